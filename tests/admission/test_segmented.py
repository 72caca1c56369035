import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.admission.base import Chain, EvictionOrder, Key
from rootcellar.admission.segmented import SegmentedOrder
from rootcellar.admission.testing import EvictionOrderContract, chain_of

paths = st.lists(st.integers(1, 3), min_size=1, max_size=5)


class TestSegmentedOrder(EvictionOrderContract):
    def make_order(self) -> EvictionOrder:
        return SegmentedOrder()

    def test_a_stream_of_new_chains_evicts_nothing_that_was_requested_again(self) -> None:
        order, hot = SegmentedOrder(), chain_of(1, 2, 3)
        _store(order, hot)
        _store(order, chain_of(9, 9, 9))
        order.request(hot)
        for number in range(100):
            new = chain_of(10 + number, 1)
            order.request(new)
            while len(order) > 6:
                _evict(order)
            _store(order, new)
        assert all(map(order.is_protected, hot))

    def test_what_is_touched_within_one_request_stays_on_probation(self) -> None:
        order, chain = SegmentedOrder(protected_share=1), chain_of(1, 2)
        order.request(chain)
        _store(order, chain)
        order.touch(chain, 2)
        assert not any(map(order.is_protected, chain))
        order.request(chain)
        assert all(map(order.is_protected, chain))

    def test_what_protected_has_no_room_for_gets_another_round(self) -> None:
        order = SegmentedOrder(protected_share=0.5)
        first, second, third, fourth = (chain_of(number) for number in range(4))
        for chain in (first, second, third, fourth):
            _store(order, chain)
        for chain in (first, second, third):
            order.request(chain)
        assert not order.is_protected(first[0])
        assert [_evict(order) for _ in range(2)] == [fourth[0], first[0]]

    def test_a_head_comes_back_to_probation_after_its_tail(self) -> None:
        order, chain = SegmentedOrder(protected_share=0.5), chain_of(1, 2, 3, 4)
        _store(order, chain)
        order.request(chain)
        assert list(map(order.is_protected, chain)) == [True, True, False, False]

    def test_protected_goes_when_nothing_else_is_free(self) -> None:
        order, chain = SegmentedOrder(protected_share=1), chain_of(1)
        _store(order, chain)
        order.request(chain)
        assert order.victim(lambda key: False) == chain[0]

    @given(
        st.lists(st.tuples(paths, st.booleans()), max_size=40), st.sampled_from([0.0, 0.3, 0.8, 1])
    )
    def test_its_share_is_never_exceeded_and_never_a_hole(
        self, steps: list[tuple[list[int], bool]], share: float
    ) -> None:
        order = SegmentedOrder(protected_share=share)
        resident: dict[Key, Key | None] = {}
        for path, evicts in steps:
            chain = chain_of(*path)
            order.request(chain)
            _store(order, chain)
            resident |= zip(chain, [None, *chain], strict=False)
            if evicts:
                del resident[_evict(order)]
            order.check_integrity()
            assert sum(map(order.is_protected, resident)) <= share * len(resident)
            assert all(parent is None or parent in resident for parent in resident.values())

    @pytest.mark.parametrize("share", [-0.1, 1.1])
    def test_a_share_that_is_none_is_refused(self, share: float) -> None:
        with pytest.raises(ValueError, match=f"protected_share is {share}"):
            SegmentedOrder(protected_share=share)


def _store(order: EvictionOrder, chain: Chain) -> None:
    for key, parent in zip(chain, [None, *chain], strict=False):
        order.add(key, parent)
    order.touch(chain, len(chain))


def _evict(order: EvictionOrder) -> Key:
    key = order.victim(lambda key: False)
    assert key is not None
    order.discard(key)
    return key
