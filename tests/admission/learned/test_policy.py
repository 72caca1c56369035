import random

import numpy as np
import pytest

from rootcellar.admission.base import (
    AdmissionPolicy,
    Answer,
    Boundary,
    Chain,
    Decision,
    EvictionOrder,
    Key,
    Offer,
    Tier,
)
from rootcellar.admission.learned.policy import NOT_LIKELY, Learned
from rootcellar.admission.testing import AdmissionContract, EvictionOrderContract, chain_of
from rootcellar.admission.write_budget import WriteBudget

TIERS = {Tier.DRAM: 64, Tier.NVME: 128}


class TestLearned(AdmissionContract):
    def make_policy(self) -> AdmissionPolicy:
        return Learned()

    def test_what_was_saved_goes_on_as_if_nothing_had_happened(self) -> None:
        """What was learned is kept; which chunks there were is not."""
        first, second = _taught(), _open()
        second.restore(first.save())
        for name in ("events", "exposure"):
            assert np.array_equal(_table(first, name), _table(second, name))
        for new, old in zip(_fresh_answers(second), _fresh_answers(first), strict=True):
            assert new.stop == old.stop
            assert new.worth == pytest.approx(old.worth, rel=0.05)  # one refit lies between


class TestWorthOrder(EvictionOrderContract):
    def make_order(self) -> EvictionOrder:
        policy = Learned()
        policy.open({Tier.DRAM: 64})
        return policy.order(Tier.DRAM)


def test_what_comes_back_is_worth_more_than_what_does_not() -> None:
    policy = _taught({Tier.DRAM: 64})
    back, once = chain_of(1, 77), chain_of(9, 9, 9, 9, 9, 9, 9, 9)
    policy.observe(back, 10_000.0)
    policy.observe(once, 10_001.0)
    policy.observe(back, 10_002.0)
    assert _worth(policy, back) > 1.4 * _worth(policy, once)


def test_a_chunk_is_worth_what_any_below_it_is() -> None:
    policy = _taught({Tier.DRAM: 64})
    chain = chain_of(1, 2, 3, 4)
    policy.observe(chain, 10_000.0)
    worth = policy.decide(Offer(Boundary.INTO_DRAM, chain, 0, 1, 0)).worth
    assert list(worth) == sorted(worth, reverse=True)


def test_a_newcomer_must_be_worth_half_as_much_again() -> None:
    policy = _taught({Tier.DRAM: 64})
    chain = chain_of(1, 2)
    policy.observe(chain, 10_000.0)
    (worth,) = policy.decide(Offer(Boundary.INTO_DRAM, chain, 1, 1, 0)).worth
    klass = policy.model.chunks["klass"][policy._book.row(chain[1])]
    assert worth == pytest.approx(policy.model.worth[klass, 0] / 1.5)


def test_a_chain_that_will_not_come_back_is_not_written() -> None:
    policy = _taught()
    full = policy.order(Tier.NVME)
    for number in range(TIERS[Tier.NVME]):
        full.add(chain_of(200, number % 256)[-1], None)
    once = chain_of(2, 9, 9, 9, 9, 9, 9, 9)
    policy.observe(once, 2_000.0)
    for number in range(20):
        policy.observe(chain_of(50 + number), 2_001.0 + number)
    refused = policy.decide(Offer(Boundary.ONTO_NVME, once[2:], 0, 8, 100))
    assert (refused.answer, refused.reason) == (Answer.REJECT, NOT_LIKELY)


def test_a_spent_write_budget_throttles() -> None:
    policy = Learned(write_budget=WriteBudget(rate_bytes_s=0.0, burst_bytes=2.0))
    policy.open(TIERS)
    policy.order(Tier.NVME)
    chain = chain_of(1, 2)
    policy.observe(chain, 0.0)
    offer = Offer(Boundary.ONTO_NVME, chain, 0, 4, 100)  # two bytes a chunk
    assert policy.decide(offer).answer is Answer.THROTTLE


def test_what_was_generated_is_paid_for_too_and_a_restart_brings_no_new_burst() -> None:
    policy = Learned(write_budget=WriteBudget(rate_bytes_s=0.0, burst_bytes=4.0))
    policy.open(TIERS)
    chain = chain_of(1, 2, 3)
    policy.observe(chain[:2], 0.0)
    offer = Offer(Boundary.ONTO_NVME, chain, 0, 3, 100)
    answers = [policy.decide(offer).answer for _ in range(2)]
    assert answers == [Answer.ADMIT, Answer.THROTTLE]
    again = Learned(write_budget=WriteBudget(rate_bytes_s=0.0, burst_bytes=4.0))
    again.open(TIERS)
    again.restore(policy.save())
    assert again.decide(offer).answer is Answer.THROTTLE


def test_one_request_gets_half_of_a_full_dram_and_all_that_is_free() -> None:
    policy = _open()
    chain = [bytes([1, n]).rjust(32, b"\0") for n in range(60)]
    policy.observe(chain, 0.0)
    assert policy.decide(Offer(Boundary.INTO_DRAM, chain, 0, 1, 0)).stop == 32
    assert policy.decide(Offer(Boundary.INTO_DRAM, chain, 0, 1, 50)).stop == 50
    assert policy.decide(Offer(Boundary.INTO_DRAM, chain, 0, 1, 60)).stop == 60


def test_a_full_hbm_takes_what_was_asked_for_again() -> None:
    policy, chain = _open(), chain_of(1, 2, 3)
    policy.observe(chain[:2], 0.0)
    policy.observe(chain, 1.0)
    assert policy.decide(Offer(Boundary.INTO_HBM, chain, 0, 1, 0)).stop == 2
    assert policy.decide(Offer(Boundary.INTO_HBM, chain, 0, 1, 3)).stop == 3


def test_what_was_generated_is_admitted_with_its_prompt() -> None:
    policy = _taught({Tier.DRAM: 64})
    chain = chain_of(1, 2, 3, 4)
    policy.observe(chain[:2], 10_000.0)
    decision = policy.decide(Offer(Boundary.INTO_DRAM, chain, 0, 1, 0))
    assert decision.stop == len(decision.worth) == 4


def test_requests_nobody_told_of_are_not_refused() -> None:
    policy = _taught()
    chain = chain_of(8, 8, 8)
    for boundary in Boundary:
        assert policy.decide(Offer(boundary, chain, 0, 1, 0)) == Decision(Answer.ADMIT, 3)


def test_memory_is_bounded_by_the_tiers() -> None:
    policy = Learned()
    policy.open({Tier.DRAM: 2})
    order = policy.order(Tier.DRAM)
    for number in range(2_000):
        chain = chain_of(number % 251 + 1, number // 251 + 1)
        policy.observe(chain, float(number))
        _replace(order, chain)
        policy.check_integrity()
    assert policy.num_tracked <= 2 + 16 * 2 + 2


def test_a_cleared_tier_is_empty_and_its_chunks_are_still_known() -> None:
    policy = _open()
    chain = chain_of(1, 2)
    policy.observe(chain, 0.0)
    before = policy.order(Tier.NVME)
    for key, parent in zip(chain, [None, *chain], strict=False):
        before.add(key, parent)
    assert len(policy.order(Tier.NVME)) == 0
    policy.check_integrity()
    policy.observe(chain, 1.0)
    assert policy.decide(Offer(Boundary.INTO_HBM, chain, 0, 1, 0)).stop == 2  # seen twice


def test_what_hangs_beside_a_chain_is_worth_what_that_is() -> None:
    policy = _taught({Tier.DRAM: 64})
    order = policy.order(Tier.DRAM)
    hot, cold, beside = chain_of(1, 77), chain_of(9, 9, 9, 9, 9, 9, 9, 9), b"b" * 32
    for now_s in (10_000.0, 10_003.0):
        policy.observe(cold if now_s == 10_000.0 else hot, now_s)
    policy.observe(hot, 10_004.0)
    for chain in (hot, cold):
        for key, parent in zip(chain, [None, *chain], strict=False):
            order.add(key, parent)
    order.add(beside, hot[-1])
    for number in range(30):
        policy.observe(chain_of(60 + number), 10_005.0 + number)
    assert order.victim(lambda key: False) == cold[-1]


def _open(tiers: dict[Tier, int] | None = None) -> Learned:
    policy = Learned()
    policy.open(tiers or TIERS)
    for tier in tiers or TIERS:
        policy.order(tier)
    return policy


def _taught(tiers: dict[Tier, int] | None = None) -> Learned:
    """Short chains came back at once, long ones never."""
    policy, rng = _open(tiers), random.Random(0)
    for number in range(0, 2_000, 2):
        short = chain_of(1, 10 + rng.randrange(200) if rng.random() < 0.5 else 5)
        policy.observe(short, float(number))
        tail = [rng.randrange(256) for _ in range(7)]
        policy.observe(chain_of(2, *tail), float(number + 1))
        policy.observe(short, float(number + 1))
    return policy


def _fresh_answers(policy: Learned) -> list[Decision]:
    chains = [chain_of(100, 1), chain_of(101, *range(1, 8))]
    for at, chain in enumerate(chains):
        policy.observe(chain, 20_000.0 + at)
    return [policy.decide(Offer(Boundary.ONTO_NVME, chain, 0, 1, 9)) for chain in chains]


def _worth(policy: Learned, chain: Chain) -> float:
    decision = policy.decide(Offer(Boundary.INTO_DRAM, chain, len(chain) - 1, 1, 0))
    return decision.worth[0]


def _table(policy: Learned, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    table = getattr(policy.model, name)
    assert isinstance(table, np.ndarray)
    return table


def _replace(order: EvictionOrder, chain: list[Key]) -> None:
    """Two chunks at most are in the tier."""
    for key, parent in zip(chain, [None, *chain], strict=False):
        while len(order) >= 2:
            victim = order.victim(lambda key: key in chain)
            assert victim is not None
            order.discard(victim)
        order.add(key, parent)
