import pytest

from rootcellar.admission.base import AdmissionPolicy, Answer, Boundary, Decision, Key, Offer, Tier
from rootcellar.admission.gated import Gated
from rootcellar.admission.testing import CAPACITY, AdmissionContract, chain_of
from rootcellar.admission.write_budget import WriteBudget

CHUNK_BYTES = 100


class TestGated(AdmissionContract):
    def make_policy(self) -> AdmissionPolicy:
        return Gated()

    @pytest.mark.parametrize("boundary", Boundary)
    def test_every_boundary_wants_a_second_request(self, boundary: Boundary) -> None:
        policy, chain = _opened(Gated()), chain_of(1, 2, 3)
        policy.observe(chain, 0.0)
        refused = policy.decide(_offer(boundary, chain))
        assert refused == Decision(Answer.REJECT, 0, "seen 1 of 2 times")
        policy.observe(chain[:2], 1.0)
        assert policy.decide(_offer(boundary, chain)).stop == 2

    @pytest.mark.parametrize("boundary", Boundary)
    def test_what_fits_into_what_is_free_enters_at_once(self, boundary: Boundary) -> None:
        policy, chain = _opened(Gated(min_seen=3, min_chunks=9)), chain_of(1, 2, 3)
        policy.observe(chain, 0.0)
        assert policy.decide(_offer(boundary, chain, 1, free=2)) == Decision(Answer.ADMIT, 3)
        assert policy.decide(_offer(boundary, chain, 1, free=1)).stop < 3

    def test_a_short_prefix_is_refused_wherever_its_head_is_known(self) -> None:
        policy, chain = _opened(Gated(min_seen=1, min_chunks=3)), chain_of(1, 2)
        policy.observe(chain, 0.0)
        for boundary in Boundary:
            decision = policy.decide(_offer(boundary, chain))
            if boundary is Boundary.ONTO_NVME:
                assert decision == Decision(Answer.ADMIT, 2)
            else:
                assert decision.reason == "prefix of 2 chunks, at least 3 are kept"

    def test_what_is_requested_again_is_protected_in_every_tier(self) -> None:
        policy, hot, other = _opened(Gated()), chain_of(1, 2), chain_of(3)
        policy.order(Tier.DRAM)  # of before the store was invalidated
        orders = [policy.order(tier) for tier in Tier]
        for order in orders:
            for key, parent in ((hot[0], None), (hot[1], hot[0]), (other[0], None)):
                order.add(key, parent)
        policy.observe(hot[:1], 0.0)
        for order in orders:
            order.touch(other, 1)
            order.discard(hot[1])
            assert order.victim(lambda key: False) == other[0]

    def test_nvme_is_written_no_more_than_the_budget_grants(self) -> None:
        budget = WriteBudget(rate_bytes_s=CHUNK_BYTES, burst_bytes=3 * CHUNK_BYTES)
        policy, chain = _opened(Gated(min_seen=1, write_budget=budget)), chain_of(1, 2, 3, 4)
        policy.observe(chain, 0.0)
        granted = policy.decide(_offer(Boundary.ONTO_NVME, chain, 1, free=99))
        assert granted == Decision(Answer.ADMIT, 4)
        assert policy.decide(_offer(Boundary.INTO_DRAM, chain, 1)).stop == 4
        spent = policy.decide(_offer(Boundary.ONTO_NVME, chain, 1, free=99))
        assert spent == Decision(Answer.THROTTLE, 1, "write budget is spent")
        policy.observe(chain, 2.0)
        part = policy.decide(_offer(Boundary.ONTO_NVME, chain, 1))
        assert part == Decision(Answer.ADMIT, 3, "write budget is spent")

    def test_a_chain_from_its_start_is_paid_whole_or_not_at_all(self) -> None:
        budget = WriteBudget(rate_bytes_s=0, burst_bytes=3 * CHUNK_BYTES)
        policy, chain = _opened(Gated(min_seen=1, write_budget=budget)), chain_of(1, 2, 3, 4)
        policy.observe(chain, 0.0)
        assert policy.decide(_offer(Boundary.ONTO_NVME, chain)).answer is Answer.THROTTLE
        assert policy.decide(_offer(Boundary.ONTO_NVME, chain[:3])).answer is Answer.ADMIT

    def test_a_scarce_budget_goes_to_what_was_seen_more_often(self) -> None:
        budget = WriteBudget(rate_bytes_s=CHUNK_BYTES / 8, burst_bytes=20 * CHUNK_BYTES)
        policy = _opened(Gated(min_seen=1, write_budget=budget))
        granted = {1: 0, 3: 0}
        for number in range(2000):
            seen = 3 if number % 8 == 0 else 1
            chain = [number.to_bytes(32)]
            for _ in range(seen):
                policy.observe(chain, float(number))
            granted[seen] += policy.decide(_offer(Boundary.ONTO_NVME, chain)).stop
        assert granted[3] > 0.9 * 250
        assert granted[1] < 0.1 * 250

    def test_a_restart_forgets_neither_what_was_seen_nor_what_was_spent(self) -> None:
        first, second = (
            _opened(
                Gated(write_budget=WriteBudget(rate_bytes_s=0, burst_bytes=CHUNK_BYTES)),
            )
            for _ in range(2)
        )
        chain = chain_of(1)
        first.observe(chain, 0.0)
        first.observe(chain, 0.0)
        first.decide(_offer(Boundary.ONTO_NVME, chain))
        second.restore(first.save())
        assert second.decide(_offer(Boundary.INTO_DRAM, chain)).answer is Answer.ADMIT
        assert second.decide(_offer(Boundary.ONTO_NVME, chain)).answer is Answer.THROTTLE

    def test_a_store_of_another_size_starts_anew(self) -> None:
        first, second, chain = _opened(Gated()), Gated(), chain_of(1)
        second.open({Tier.DRAM: 100_000})
        first.observe(chain, 0.0)
        second.restore(first.save())
        second.observe(chain, 0.0)
        assert second.decide(_offer(Boundary.INTO_DRAM, chain)).reason == "seen 1 of 2 times"

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("min_seen", 0),
            ("min_seen", 256),
            ("min_chunks", 0),
            ("history", 0),
            ("history", 1025),
            ("protected_share", 1.5),
        ],
    )
    def test_what_makes_no_sense_is_refused_by_name(self, field: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"{field} is {value}"):
            Gated(**{field: value})  # type: ignore[arg-type]  # by name, all numbers


def _opened(policy: Gated) -> Gated:
    policy.open(CAPACITY)
    return policy


def _offer(boundary: Boundary, chain: list[Key], start: int = 0, free: int = 0) -> Offer:
    return Offer(boundary, chain, start, CHUNK_BYTES * (len(chain) - start), free)
