import pytest

from rootcellar.admission.base import Answer, Boundary, Decision, Offer
from rootcellar.admission.min_length import MinLength
from rootcellar.admission.testing import chain_of


@pytest.mark.parametrize("length", [3, 4])
def test_a_chain_that_is_long_enough_enters_whole(length: int) -> None:
    assert MinLength(3).decide(_offer(length, start=1)) == Decision(Answer.ADMIT, length)


def test_a_short_one_says_how_long_it_had_to_be() -> None:
    reason = "prefix of 2 chunks, at least 3 are kept"
    assert MinLength(3).decide(_offer(2, start=1)) == Decision(Answer.REJECT, 1, reason)
    assert MinLength(3).decide(_offer(1)).reason == "prefix of 1 chunk, at least 3 are kept"


def test_a_zero_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="min_chunks is 0"):
        MinLength(0)


def _offer(length: int, start: int = 0) -> Offer:
    return Offer(Boundary.INTO_DRAM, chain_of(*[1] * length), start, 4096, 0)
