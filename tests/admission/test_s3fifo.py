import random
from collections import deque

from rootcellar.admission.base import AdmissionPolicy, Chain, EvictionOrder, Key
from rootcellar.admission.s3fifo import S3Fifo, S3FifoOrder
from rootcellar.admission.testing import (
    AdmissionContract,
    EvictionOrderContract,
    chain_of,
    hits_of,
)


class TestS3FifoOrder(EvictionOrderContract):
    def make_order(self) -> EvictionOrder:
        return S3FifoOrder()

    def test_a_chain_that_was_never_requested_again_goes_quickly(self) -> None:
        order, old = S3FifoOrder(), chain_of(1, 1)
        _store(order, old)
        order.request(old)
        order.request(old)
        new = chain_of(2, 2)
        _store(order, new)
        assert [_evict(order) for _ in new] == new[::-1]

    def test_a_ghost_comes_back_into_main(self) -> None:
        order, keys = S3FifoOrder(), [chain_of(number) for number in range(3)]
        for chain in keys:
            _store(order, chain)
        assert _evict(order) == keys[0][0]
        _store(order, keys[0])
        assert [_evict(order) for _ in keys] == [keys[1][0], keys[2][0], keys[0][0]]

    def test_a_touch_within_a_request_is_no_chance(self) -> None:
        order, first, second = S3FifoOrder(), chain_of(1), chain_of(2)
        for chain in (first, second):
            _store(order, chain)
        for _ in range(5):
            order.touch(first, 1)
        assert _evict(order) == first[0]


class TestS3Fifo(AdmissionContract):
    def make_policy(self) -> AdmissionPolicy:
        return S3Fifo()

    def test_on_single_chunks_it_hits_as_the_plain_one_does(self) -> None:
        for seed in range(5):
            rng = random.Random(seed)
            stream = [min(int(rng.paretovariate(0.7)), 200) for _ in range(1500)]
            for capacity in (10, 40):
                assert hits_of(S3Fifo(), stream, capacity) == _plain(stream, capacity)


def _plain(stream: list[int], capacity: int) -> list[bool]:
    """The paper's algorithm on queues from oldest to youngest."""
    small, main, ghost = deque[int](), deque[int](), deque[int]()
    chances, hits = dict[int, int](), list[bool]()

    def evict() -> None:
        while True:
            if 10 * len(small) >= capacity:
                oldest = small.popleft()
                if chances[oldest] <= 1:
                    ghost.append(oldest)
                    break
                chances[oldest] = 0
                main.append(oldest)
            else:
                oldest = main.popleft()
                if chances[oldest] == 0:
                    break
                chances[oldest] -= 1
                main.append(oldest)
        del chances[oldest]
        while len(ghost) > capacity - capacity // 10:
            ghost.popleft()

    for number in stream:
        hits.append(number in chances)
        if hits[-1]:
            chances[number] = min(chances[number] + 1, 3)
            continue
        if len(chances) == capacity:
            evict()
        chances[number] = 0
        if number in ghost:
            ghost.remove(number)
            main.append(number)
        else:
            small.append(number)
    return hits


def _store(order: EvictionOrder, chain: Chain) -> None:
    for key, parent in zip(chain, [None, *chain], strict=False):
        order.add(key, parent)
    order.touch(chain, len(chain))


def _evict(order: EvictionOrder) -> Key:
    key = order.victim(lambda key: False)
    assert key is not None
    order.discard(key)
    return key
