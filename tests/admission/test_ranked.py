from rootcellar.admission.base import EvictionOrder, Key
from rootcellar.admission.ranked import RankedOrder
from rootcellar.admission.testing import EvictionOrderContract


class Costly(RankedOrder):
    """A use of a key costs what its last byte says."""

    def _cost(self, key: Key) -> float:
        return float(key[-1])


def key_of(number: int, cost: int) -> Key:
    return number.to_bytes(31) + bytes([cost])


class TestRankedOrder(EvictionOrderContract):
    def make_order(self) -> EvictionOrder:
        return Costly()

    def test_uses_count_as_much_as_they_cost(self) -> None:
        order, cheap, dear = Costly(), key_of(1, 2), key_of(2, 5)
        order.add(cheap, None)
        order.add(dear, None)
        assert order.victim(lambda key: False) == cheap
        order.request([cheap])
        order.request([cheap])
        assert order.victim(lambda key: False) == dear

    def test_what_was_hot_once_is_overtaken_when_others_have_come_and_gone(self) -> None:
        order, hot = Costly(), key_of(0, 1)
        order.add(hot, None)
        for _ in range(9):
            order.request([hot])
        gone = 0
        while hot in order:
            order.add(key_of(gone + 1, 1), None)
            gone += 1
            victim = order.victim(lambda key: False)
            assert victim is not None
            order.discard(victim)
        assert gone == 10

    def test_of_equals_the_one_unused_for_longest_goes(self) -> None:
        order, first, second = Costly(), key_of(1, 1), key_of(2, 1)
        for key in (first, second):
            order.add(key, None)
        order.request([second])
        order.request([first])
        assert order.victim(lambda key: False) == second
