import random

from rootcellar.admission.base import AdmissionPolicy
from rootcellar.admission.slru import Slru
from rootcellar.admission.testing import AdmissionContract, hits_of


class TestSlru(AdmissionContract):
    def make_policy(self) -> AdmissionPolicy:
        return Slru()

    def test_on_single_chunks_it_hits_as_the_plain_one_does(self) -> None:
        for seed in range(5):
            rng = random.Random(seed)
            stream = [min(int(rng.paretovariate(0.7)), 200) for _ in range(1500)]
            assert hits_of(Slru(), stream, 24) == _plain(stream, 24)


def _plain(stream: list[int], capacity: int) -> list[bool]:
    """Lists from oldest to youngest; protected holds half of what is resident."""
    probation, protected, hits = list[int](), list[int](), list[bool]()

    def shrink() -> None:
        while 2 * len(protected) > len(probation) + len(protected):
            probation.append(protected.pop(0))

    for number in stream:
        hits.append(number in probation or number in protected)
        if hits[-1]:
            (probation if number in probation else protected).remove(number)
            protected.append(number)
            shrink()
            if number in probation:  # where a hit is the youngest of all
                probation.remove(number)
                probation.append(number)
        else:
            if len(probation) + len(protected) == capacity:
                (probation or protected).pop(0)
                shrink()
            probation.append(number)
    return hits
