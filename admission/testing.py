"""Contracts that every order and every policy must pass: subclass, say how to make one, run pytest.

They need pytest and hypothesis, which only tests install.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from .base import AdmissionPolicy, Answer, Boundary, EvictionOrder, Key, Offer, Tier

CAPACITY = {Tier.HBM: 4, Tier.DRAM: 8, Tier.NVME: 32}
"""What a policy in a contract is opened with, in chunks."""


def chain_of(*path: int) -> list[Key]:
    """Keys along a path of branch numbers; equal leading numbers share their keys."""
    return [bytes(path[: depth + 1]).rjust(32, b"\0") for depth in range(len(path))]


def random_chain(rng: random.Random, *, max_length: int = 6, branches: int = 3) -> list[Key]:
    return chain_of(*(rng.randrange(branches) + 1 for _ in range(rng.randint(1, max_length))))


def hits_of(policy: AdmissionPolicy, stream: Sequence[int], capacity: int) -> list[bool]:
    """Which of these single-chunk requests find their chunk, in one tier that admits everything."""
    policy.open({Tier.DRAM: capacity})
    order, hits = policy.order(Tier.DRAM), list[bool]()
    for now_s, number in enumerate(stream):
        chain = [number.to_bytes(32)]
        policy.observe(chain, float(now_s))
        hits.append(chain[0] in order)
        order.touch(chain, int(hits[-1]))
        if not hits[-1]:
            if len(order) == capacity:
                victim = order.victim(_nobody)
                assert victim is not None
                order.discard(victim)
            order.add(chain[0], None)
        order.touch(chain, 1)
    order.check_integrity()
    return hits


class EvictionOrderContract(ABC):
    """What a tier relies on, whatever the order among leaves is."""

    @abstractmethod
    def make_order(self) -> EvictionOrder: ...

    def test_a_new_order_is_empty_and_names_no_victim(self) -> None:
        order = self.make_order()
        assert len(order) == 0
        assert order.victim(_nobody) is None

    def test_a_chain_is_evicted_from_its_tail(self) -> None:
        order, chain = self.make_order(), chain_of(1, 2, 3, 4)
        _add(order, chain)
        for key in reversed(chain):
            assert order.victim(_nobody) == key
            order.discard(key)
        assert len(order) == 0

    def test_a_busy_chunk_is_never_named(self) -> None:
        order, chain, other = self.make_order(), chain_of(1, 2), chain_of(7)
        _add(order, chain)
        _add(order, other)
        assert order.victim(lambda key: key == chain[-1]) == other[0]
        assert order.victim(lambda key: key in (chain[-1], other[0])) is None

    def test_adding_and_discarding_twice_changes_nothing(self) -> None:
        order, chain = self.make_order(), chain_of(1, 2)
        _add(order, chain)
        _add(order, chain)
        assert len(order) == 2
        order.discard(chain[1])
        order.discard(chain[1])
        assert len(order) == 1
        order.check_integrity()

    def test_a_child_may_be_here_without_its_parent(self) -> None:
        order, chain = self.make_order(), chain_of(1, 2, 3)
        order.add(chain[2], chain[1])
        order.add(chain[1], chain[0])
        assert order.has_child(chain[0])
        assert order.descendants(chain[0]) == chain[1:]
        assert order.victim(_nobody) == chain[2]

    def test_a_leaf_is_worth_less_than_everything_and_no_leaf_less_than_nothing_at_all(
        self,
    ) -> None:
        order, chain = self.make_order(), chain_of(1, 2)
        _add(order, chain)
        assert order.victim(_nobody, worth=math.inf) == chain[1]
        assert order.victim(_nobody, worth=-math.inf) in (chain[1], None)

    def test_passing_over_what_was_named_goes_through_every_leaf_once(self) -> None:
        """The cleaner does so: it names, and what it named stays."""
        order, rng = self.make_order(), random.Random(0)
        resident: dict[Key, Key | None] = {}
        for _ in range(30):
            chain = random_chain(rng)
            _add(order, chain)
            order.touch(chain, len(chain))
            resident |= zip(chain, [None, *chain], strict=False)
        named: list[Key] = []
        while (key := order.victim(named.__contains__)) is not None:
            named.append(key)
        assert set(named) == _leaves(resident)
        assert len(named) == len(_leaves(resident))
        order.check_integrity()

    def test_any_traffic_keeps_the_forest_right(self) -> None:
        class Machine(_OrderMachine):
            make_order = staticmethod(self.make_order)

        run_state_machine_as_test(
            Machine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
        )


class _OrderMachine(RuleBasedStateMachine):
    """An order beside a dictionary of parents."""

    paths = st.lists(st.integers(1, 3), min_size=1, max_size=6)
    chosen = st.sets(st.integers(0, 40))
    make_order: Callable[[], EvictionOrder]

    def __init__(self) -> None:
        super().__init__()
        self.order = self.make_order()
        self.resident: dict[Key, Key | None] = {}

    @initialize(path=paths)
    def starts_with_a_chain(self, path: list[int]) -> None:
        self.adds(path, 0)

    @rule(path=paths, start=st.integers(0, 2))
    def adds(self, path: list[int], start: int) -> None:
        chain = chain_of(*path)
        for key, parent in list(zip(chain, [None, *chain], strict=False))[start:]:
            self.order.add(key, parent)
            self.resident[key] = parent

    @rule(path=paths, stop=st.integers(0, 6))
    def touches(self, path: list[int], stop: int) -> None:
        self.order.touch(chain_of(*path), min(stop, len(path)))

    @rule(path=paths)
    def discards_with_all_below(self, path: list[int]) -> None:
        """As when a chunk turns out to be corrupt."""
        key = chain_of(*path)[-1]
        for gone in [*reversed(self.order.descendants(key)), key]:
            self.order.discard(gone)
            self.resident.pop(gone, None)

    @rule(busy=chosen, worth=st.none() | st.floats(allow_nan=False), evicts=st.booleans())
    def names_a_victim(self, busy: set[int], worth: float | None, evicts: bool) -> None:
        here = sorted(self.resident)
        in_use = {here[index] for index in busy if index < len(here)}
        free = _leaves(self.resident) - in_use
        victim = self.order.victim(in_use.__contains__, worth)
        if victim is None:
            assert not free or worth is not None
        else:
            assert victim in free
            if evicts:
                self.order.discard(victim)
                del self.resident[victim]

    @rule(path=paths)
    def answers(self, path: list[int]) -> None:
        for key in chain_of(*path):
            assert (key in self.order) == (key in self.resident)
            assert self.order.has_child(key) == (key in self.resident.values())
            below = self.order.descendants(key)
            assert set(below) == _below(self.resident, key)
            for index, child in enumerate(below):
                assert self.resident[child] not in below[index:]

    @invariant()
    def is_whole(self) -> None:
        self.order.check_integrity()
        assert len(self.order) == len(self.resident)


class AdmissionContract(ABC):
    """What the store relies on, whatever a policy thinks a chain is worth."""

    @abstractmethod
    def make_policy(self) -> AdmissionPolicy: ...

    def open_policy(self) -> AdmissionPolicy:
        policy = self.make_policy()
        policy.open(CAPACITY)
        return policy

    def test_every_tier_gets_an_empty_order_of_its_own(self) -> None:
        policy = self.open_policy()
        orders = [policy.order(tier) for tier in Tier] + [policy.order(Tier.DRAM)]
        _add(orders[0], chain_of(1, 2))
        assert [len(order) for order in orders] == [2, 0, 0, 0]

    def test_decisions_lie_within_the_offer_and_explain_themselves(self) -> None:
        rng, policy = random.Random(0), self.open_policy()
        for now_s in range(300):
            chain = random_chain(rng)
            policy.observe(chain, float(now_s))
            for boundary in Boundary:
                start = rng.randint(0, len(chain))
                offer = Offer(boundary, chain, start, 4096 * len(chain), rng.randrange(3))
                decision = policy.decide(offer)
                assert decision.stop <= len(chain)
                if decision.answer is not Answer.ADMIT or decision.stop < len(chain):
                    assert decision.reason
                if decision.answer is Answer.ADMIT:
                    assert decision.stop >= start
                    assert len(decision.worth) in (0, decision.stop - start)

    def test_the_same_traffic_gets_the_same_decisions(self) -> None:
        policies = self.open_policy(), self.open_policy()
        assert _decisions(policies[0], seed=1) == _decisions(policies[1], seed=1)

    def test_what_was_saved_goes_on_as_if_nothing_had_happened(self) -> None:
        """Holds for policies that save; the others start anew."""
        first, second, fresh = self.open_policy(), self.open_policy(), self.open_policy()
        _decisions(first, seed=1)
        saved = first.save()
        second.restore(saved)
        assert _decisions(second, seed=2) == _decisions(first if saved else fresh, seed=2)

    def test_a_save_that_makes_no_sense_is_ignored(self) -> None:
        trained = self.open_policy()
        _decisions(trained, seed=1)
        saved = trained.save()
        for data in (b"", b"garbage", bytes(4096), saved[: len(saved) // 2], b"x" + saved):
            policy = self.open_policy()
            policy.restore(data)
            assert _decisions(policy, seed=2) == _decisions(self.open_policy(), seed=2)


def _nobody(key: Key) -> bool:
    return False


def _add(order: EvictionOrder, chain: list[Key]) -> None:
    for key, parent in zip(chain, [None, *chain], strict=False):
        order.add(key, parent)


def _decisions(policy: AdmissionPolicy, *, seed: int) -> list[object]:
    rng, decisions = random.Random(seed), list[object]()
    for now_s in range(200):
        chain = random_chain(rng)
        policy.observe(chain, float(now_s + 1000 * seed))
        for boundary in Boundary:
            decision = policy.decide(Offer(boundary, chain, 0, 4096, 1))
            worth = list(decision.worth)
            decisions.append((decision.answer, decision.stop, decision.reason, worth))
    return decisions


def _leaves(resident: dict[Key, Key | None]) -> set[Key]:
    return set(resident) - set(resident.values())


def _below(resident: dict[Key, Key | None], key: Key) -> set[Key]:
    found: set[Key] = set()
    level = {key}
    while level:
        level = {child for child, parent in resident.items() if parent in level}
        found |= level
    return found
