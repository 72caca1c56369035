"""Contracts that every order and every policy must pass: subclass, say how to make one, run pytest.

They need pytest and hypothesis, which only tests install.
"""

import random
from abc import ABC, abstractmethod

from .base import AdmissionPolicy, Answer, Boundary, EvictionOrder, Key, Offer, Tier


def chain_of(*path: int) -> list[Key]:
    """Keys along a path of branch numbers; equal leading numbers share their keys."""
    return [bytes(path[: depth + 1]).rjust(32, b"\0") for depth in range(len(path))]


def random_chain(rng: random.Random, *, max_length: int = 6, branches: int = 3) -> list[Key]:
    return chain_of(*(rng.randrange(branches) + 1 for _ in range(rng.randint(1, max_length))))


class EvictionOrderContract(ABC):
    """What a tier relies on, whatever the order among leaves is."""

    @abstractmethod
    def make_order(self) -> EvictionOrder: ...

    def test_a_new_order_is_empty_and_names_no_victim(self) -> None:
        order = self.make_order()
        assert len(order) == 0
        assert order.victim(lambda key: False) is None

    def test_a_chain_is_evicted_from_its_tail(self) -> None:
        order, chain = self.make_order(), chain_of(1, 2, 3, 4)
        _add(order, chain)
        for key in reversed(chain):
            assert order.victim(lambda key: False) == key
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
        assert order.victim(lambda key: False) == chain[2]

    def test_random_traffic_keeps_the_forest_right(self) -> None:
        for seed in range(30):
            self._random_traffic(random.Random(seed))

    def _random_traffic(self, rng: random.Random) -> None:
        order = self.make_order()
        resident: dict[Key, Key | None] = {}
        for _ in range(60):
            chain = random_chain(rng)
            action = rng.randrange(3)
            if action == 0:
                _add(order, chain)
                resident |= zip(chain, [None, *chain], strict=False)
            elif action == 1:
                order.touch(chain, rng.randint(0, len(chain)))
            else:
                busy = set(rng.sample(sorted(resident), len(resident) // 4))
                victim = order.victim(busy.__contains__)
                leaves = set(resident) - set(resident.values()) - busy
                assert (victim is None) == (not leaves)
                if victim is not None:
                    assert victim in leaves
                    order.discard(victim)
                    del resident[victim]
            order.check_integrity()
            assert len(order) == len(resident)
            for key in chain:
                assert (key in order) == (key in resident)
                assert order.has_child(key) == (key in resident.values())
                assert set(order.descendants(key)) == _below(resident, key)


class AdmissionContract(ABC):
    """What the store relies on, whatever a policy thinks a chain is worth."""

    @abstractmethod
    def make_policy(self) -> AdmissionPolicy: ...

    def test_every_tier_gets_an_empty_order_of_its_own(self) -> None:
        policy = self.make_policy()
        orders = [policy.order(tier) for tier in Tier] + [policy.order(Tier.DRAM)]
        _add(orders[0], chain_of(1, 2))
        assert [len(order) for order in orders] == [2, 0, 0, 0]

    def test_decisions_lie_within_the_offer_and_explain_themselves(self) -> None:
        rng, policy = random.Random(0), self.make_policy()
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

    def test_the_same_traffic_gets_the_same_decisions(self) -> None:
        assert self._decisions() == self._decisions()

    def _decisions(self) -> list[object]:
        rng, policy = random.Random(1), self.make_policy()
        decisions: list[object] = []
        for now_s in range(200):
            chain = random_chain(rng)
            policy.observe(chain, float(now_s))
            decisions += [policy.decide(Offer(b, chain, 0, 4096, 1)) for b in Boundary]
        return decisions


def _add(order: EvictionOrder, chain: list[Key]) -> None:
    for key, parent in zip(chain, [None, *chain], strict=False):
        order.add(key, parent)


def _below(resident: dict[Key, Key | None], key: Key) -> set[Key]:
    found: set[Key] = set()
    level = {key}
    while level:
        level = {child for child, parent in resident.items() if parent in level}
        found |= level
    return found
