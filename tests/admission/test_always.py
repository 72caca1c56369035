from rootcellar.admission.always import Always
from rootcellar.admission.base import AdmissionPolicy, Answer, Boundary, Decision, Offer
from rootcellar.admission.testing import AdmissionContract, chain_of


class TestAlways(AdmissionContract):
    def make_policy(self) -> AdmissionPolicy:
        return Always()

    def test_everything_crosses_every_boundary(self) -> None:
        chain = chain_of(1, 2, 3)
        for boundary in Boundary:
            decision = Always().decide(Offer(boundary, chain, 1, 1 << 40, 0))
            assert decision == Decision(Answer.ADMIT, 3)
