import random

from rootcellar.admission.base import AdmissionPolicy, EvictionOrder
from rootcellar.admission.lfu import Lfu, LfuOrder
from rootcellar.admission.testing import AdmissionContract, EvictionOrderContract, hits_of


class TestLfuOrder(EvictionOrderContract):
    def make_order(self) -> EvictionOrder:
        return LfuOrder()


class TestLfu(AdmissionContract):
    def make_policy(self) -> AdmissionPolicy:
        return Lfu()

    def test_on_single_chunks_it_hits_as_the_plain_one_does(self) -> None:
        for seed in range(5):
            rng = random.Random(seed)
            stream = [min(int(rng.paretovariate(0.7)), 200) for _ in range(1500)]
            stream += [200 + number for number in stream]  # what was hot is no more
            assert hits_of(Lfu(), stream, 20) == _plain(stream, 20)


def _plain(stream: list[int], capacity: int) -> list[bool]:
    uses, rank, level = dict[int, int](), dict[int, tuple[float, int]](), 0.0
    hits = list[bool]()
    for now, number in enumerate(stream):
        hits.append(number in uses)
        if not hits[-1] and len(uses) == capacity:
            victim = min(rank, key=rank.__getitem__)
            level, _ = rank.pop(victim)
            del uses[victim]
        uses[number] = uses.get(number, 0) + 1
        rank[number] = (level + uses[number], now)
    return hits
