"""Who waits for a load that is under way, and who does not."""

import pytest
from vllm.v1.kv_offload.base import OffloadKey

from rootcellar.connector.vllm.underway import LoadsUnderWay


def keys(start: int, stop: int) -> list[OffloadKey]:
    return [OffloadKey(number.to_bytes(36, "big")) for number in range(start, stop)]


@pytest.mark.parametrize(("own", "waits"), [(1, False), (4, False), (5, True), (100, True)])
def test_a_request_waits_for_a_load_at_most_twice_as_long_as_its_own(own: int, waits: bool) -> None:
    loads = LoadsUnderWay(lambda: own)
    loads.update(keys(0, 10))
    assert (keys(0, 1)[0] in loads) is waits


def test_nobody_waits_for_chunks_that_are_not_under_way() -> None:
    loads = LoadsUnderWay(lambda: 100)
    assert not loads
    loads.update(keys(0, 10))
    assert loads
    assert keys(10, 11)[0] not in loads
    loads.difference_update(set(keys(0, 9)))
    assert keys(8, 9)[0] not in loads
    assert keys(9, 10)[0] in loads
    loads.clear()
    assert not loads
