from hypothesis import given
from hypothesis import strategies as st

from rootcellar.admission.base import EvictionOrder, Key
from rootcellar.admission.leaf_queue import PATIENCE
from rootcellar.admission.lru import LruOrder
from rootcellar.admission.testing import EvictionOrderContract, chain_of

paths = st.lists(st.integers(1, 3), min_size=1, max_size=5)
steps = st.tuples(paths, st.booleans(), st.sets(st.integers(0, 6)))


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

    @given(st.lists(steps, max_size=50))
    def test_the_victim_is_the_free_leaf_unused_for_longest_whoever_asked_before(
        self, steps: list[tuple[list[int], bool, set[int]]]
    ) -> None:
        order, parents, used = LruOrder(), dict[Key, Key | None](), list[Key]()
        for path, touches, chosen in steps:
            chain = chain_of(*path)
            for key, parent in zip(chain, [None, *chain], strict=False):
                if key not in parents:
                    used.append(key)
                    parents[key] = parent
                    order.add(key, parent)
            if touches:
                order.touch(chain, len(chain))
                used = [key for key in used if key not in chain] + chain[::-1]
            for evicts in (False, True):
                busy = {key for index, key in enumerate(used) if index % 7 in chosen and evicts}
                leaves = parents.keys() - set(parents.values()) - busy
                expected = next((key for key in used if key in leaves), None)
                assert order.victim(busy.__contains__) == expected
                if evicts and expected is not None and len(parents) > 6:
                    order.discard(expected)
                    used.remove(expected)
                    del parents[expected]

    def test_a_crowd_of_busy_chunks_is_walked_over_once(self) -> None:
        order, asked = LruOrder(), 0
        for number in range(5050):
            order.add(number.to_bytes(32), None)
        crowd = {number.to_bytes(32) for number in range(5000)}

        def busy(key: bytes) -> bool:
            nonlocal asked
            asked += 1
            return key in crowd

        for number in range(5000, 5050):
            assert order.victim(busy) == number.to_bytes(32)
            order.discard(number.to_bytes(32))
        assert asked <= 5000 + 50 * (PATIENCE + 4)

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
        assert hashed < 30 * len(chain)
