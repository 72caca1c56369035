from rootcellar.admission.base import EvictionOrder
from rootcellar.admission.lru import LruOrder
from rootcellar.admission.testing import EvictionOrderContract, chain_of


class TestLruOrder(EvictionOrderContract):
    def make_order(self) -> EvictionOrder:
        return LruOrder()

    def test_the_chain_unused_for_longest_goes_first(self) -> None:
        order, old, new = LruOrder(), chain_of(1, 2), chain_of(1, 3)
        for chain in (old, new):
            for key, parent in zip(chain, [None, *chain], strict=False):
                order.add(key, parent)
        order.touch(old, 2)
        assert order.victim(lambda key: False) == new[1]
        order.touch(new, 1)  # only the shared head
        assert order.victim(lambda key: False) == new[1]
        order.touch(new, 2)
        assert order.victim(lambda key: False) == old[1]

    def test_a_crowd_of_busy_chunks_is_walked_over_once(self) -> None:
        order, asked = LruOrder(), 0
        for number in range(100):
            order.add(chain_of(number)[0], None)
        crowd = {chain_of(number)[0] for number in range(50)}

        def busy(key: bytes) -> bool:
            nonlocal asked
            asked += 1
            return key in crowd

        for number in range(50, 100):
            assert order.victim(busy) == chain_of(number)[0]
            order.discard(chain_of(number)[0])
        assert asked <= 100

    def test_a_chain_added_from_its_head_is_walked_over_once(self) -> None:
        hashed = 0

        class Key(bytes):
            def __hash__(self) -> int:
                nonlocal hashed
                hashed += 1
                return super().__hash__()

        order, chain = LruOrder(), [Key(number.to_bytes(32)) for number in range(100)]
        for key, parent in zip(chain, [None, *chain], strict=False):
            order.add(key, parent)
        hashed = 0
        for key in reversed(chain):
            assert order.victim(lambda key: False) == key
            order.discard(key)
        assert hashed < 20 * len(chain)
