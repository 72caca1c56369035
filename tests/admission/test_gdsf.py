from rootcellar.admission.base import AdmissionPolicy, EvictionOrder
from rootcellar.admission.gdsf import DEPTH_OF_DOUBLE_COST, Gdsf, GdsfOrder
from rootcellar.admission.testing import AdmissionContract, EvictionOrderContract, chain_of


class TestGdsfOrder(EvictionOrderContract):
    def make_order(self) -> EvictionOrder:
        return GdsfOrder()

    def test_of_chains_as_hot_as_each_other_the_deeper_stays(self) -> None:
        order, deep, flat = GdsfOrder(), chain_of(*[1] * 5), chain_of(2)
        for key, parent in zip([*deep, *flat], [None, *deep[:-1], None], strict=True):
            order.add(key, parent)
        assert order.victim(lambda key: False) == flat[0]

    def test_a_depth_that_was_not_known_is_learned_from_a_request(self) -> None:
        order, deep, flat = GdsfOrder(), chain_of(*[1] * 5), chain_of(2)
        order.add(deep[4], deep[3])  # its parent lives elsewhere
        order.add(flat[0], None)
        for chain in (deep, flat):
            order.request(chain)
        assert order.victim(lambda key: False) == flat[0]

    def test_depth_counts_double_at_the_depth_that_says_so(self) -> None:
        order, deep = GdsfOrder(), [bytes([1, n]).rjust(32) for n in range(DEPTH_OF_DOUBLE_COST)]
        flat = chain_of(2)
        for key, parent in zip([*deep, *flat], [None, *deep[:-1], None], strict=True):
            order.add(key, parent)
        order.request(flat)  # twice as often used as the deep end, which costs almost as much
        assert order.victim(lambda key: False) == deep[-1]


class TestGdsf(AdmissionContract):
    def make_policy(self) -> AdmissionPolicy:
        return Gdsf()
