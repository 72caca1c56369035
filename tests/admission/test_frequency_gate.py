from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.admission.base import AdmissionPolicy, Answer, Boundary, Key, Offer
from rootcellar.admission.frequency_gate import FrequencyGate
from rootcellar.admission.testing import AdmissionContract, chain_of

paths = st.lists(st.integers(1, 3), min_size=1, max_size=5)


class TestFrequencyGate(AdmissionContract):
    def make_policy(self) -> AdmissionPolicy:
        return FrequencyGate()

    def test_a_chain_enters_with_its_second_request(self) -> None:
        gate, chain = FrequencyGate(), chain_of(1, 2)
        gate.observe(chain, 0.0)
        refused = gate.decide(_offer(chain))
        assert (refused.answer, refused.stop) == (Answer.REJECT, 0)
        assert refused.reason == "seen 1 of 2 times"
        gate.observe(chain, 1.0)
        assert gate.decide(_offer(chain)).stop == 2

    def test_a_shared_head_enters_before_the_new_tail(self) -> None:
        gate = FrequencyGate()
        gate.observe(chain_of(1, 2), 0.0)
        gate.observe(chain_of(1, 3), 1.0)
        decision = gate.decide(_offer(chain_of(1, 3)))
        assert (decision.answer, decision.stop) == (Answer.ADMIT, 1)

    def test_writing_down_is_not_gated(self) -> None:
        chain = chain_of(1)
        assert FrequencyGate().decide(Offer(Boundary.ONTO_NVME, chain, 0, 1, 0)).stop == 1

    @given(st.lists(paths, max_size=30), paths, st.integers(1, 4))
    def test_it_agrees_with_an_exact_counter(
        self, requests: list[list[int]], offered: list[int], min_seen: int
    ) -> None:
        gate = FrequencyGate(min_seen=min_seen)
        seen: Counter[Key] = Counter()
        for path in requests:
            gate.observe(chain_of(*path), 0.0)
            seen.update(chain_of(*path))
        chain = chain_of(*offered)
        expected = next((i for i, key in enumerate(chain) if seen[key] < min_seen), len(chain))
        assert gate.decide(_offer(chain)).stop == expected

    @given(st.lists(paths, max_size=60))
    def test_a_bounded_history_forgets_tails_before_heads(self, requests: list[list[int]]) -> None:
        gate = FrequencyGate(min_seen=1, history_entries=6)
        for path in requests:
            gate.observe(chain_of(*path), 0.0)
        for path in requests:
            chain = chain_of(*path)
            known = [gate.decide(_offer(chain[: n + 1], n)).stop > n for n in range(len(chain))]
            assert known == sorted(known, reverse=True)

    @pytest.mark.parametrize("field", ["min_seen", "history_entries"])
    def test_a_zero_is_refused_by_name(self, field: str) -> None:
        with pytest.raises(ValueError, match=f"{field} is 0"):
            FrequencyGate(**{field: 0})  # type: ignore[arg-type]  # by name, both are int


def _offer(chain: list[Key], start: int = 0) -> Offer:
    return Offer(Boundary.INTO_DRAM, chain, start, 4096, 0)
