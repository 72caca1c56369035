from rootcellar.admission.base import (
    AdmissionPolicy,
    Answer,
    Boundary,
    Decision,
    Key,
    Offer,
    Tier,
)
from rootcellar.admission.lru import LruOrder
from rootcellar.admission.testing import AdmissionContract, chain_of
from rootcellar.admission.ungated import Ungated


class Listening(LruOrder):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[list[Key]] = []

    def request(self, chain: list[Key]) -> None:  # type: ignore[override]  # lists is all it gets
        self.heard.append(chain)


class TestUngated(AdmissionContract):
    def make_policy(self) -> AdmissionPolicy:
        return Ungated(LruOrder)

    def test_everything_crosses_every_boundary(self) -> None:
        chain = chain_of(1, 2, 3)
        for boundary in Boundary:
            decision = Ungated(LruOrder).decide(Offer(boundary, chain, 1, 1 << 40, 0))
            assert decision == Decision(Answer.ADMIT, 3)

    def test_each_tiers_newest_order_hears_of_a_request_once(self) -> None:
        policy, chain = Ungated(Listening), chain_of(1)
        old, dram, nvme = (policy.order(tier) for tier in (Tier.DRAM, Tier.DRAM, Tier.NVME))
        policy.observe(chain, 0.0)
        heard = [order.heard for order in (old, dram, nvme) if isinstance(order, Listening)]
        assert heard == [[], [chain], [chain]]
