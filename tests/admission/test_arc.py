import random

from rootcellar.admission.arc import Arc, ArcOrder
from rootcellar.admission.base import AdmissionPolicy, EvictionOrder
from rootcellar.admission.testing import (
    AdmissionContract,
    EvictionOrderContract,
    chain_of,
    hits_of,
)


class TestArcOrder(EvictionOrderContract):
    def make_order(self) -> EvictionOrder:
        return ArcOrder()

    def test_what_was_requested_again_outlives_a_scan(self) -> None:
        order, hot = ArcOrder(), chain_of(1, 2)
        for key, parent in zip(hot, [None, hot[0]], strict=True):
            order.add(key, parent)
        order.request(hot)
        for number in range(2, 50):
            new = chain_of(number)
            order.request(new)
            order.add(new[0], None)
            order.touch(new, 1)
            if len(order) > 4:
                victim = order.victim(lambda key: False)
                assert victim is not None
                order.discard(victim)
        assert all(key in order for key in hot)


class TestArc(AdmissionContract):
    def make_policy(self) -> AdmissionPolicy:
        return Arc()

    def test_on_single_chunks_it_hits_as_the_plain_one_does(self) -> None:
        for seed in range(5):
            rng = random.Random(seed)
            hot = [min(int(rng.paretovariate(0.7)), 200) for _ in range(1000)]
            loop = [number % 30 for number in range(300)]
            stream = hot + loop + [number % 45 for number in range(400)] + hot
            for capacity in (3, 20, 40):
                assert hits_of(Arc(), stream, capacity) == _plain(stream, capacity)


def _plain(stream: list[int], c: int) -> list[bool]:
    """Figure 4 of the paper; lists from oldest to youngest."""
    t1, t2, b1, b2 = list[int](), list[int](), list[int](), list[int]()
    p, hits = 0.0, list[bool]()

    def replace(x: int) -> None:
        if t1 and ((x in b2 and len(t1) == p) or len(t1) > p):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for x in stream:
        hits.append(x in t1 or x in t2)
        if hits[-1]:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:
            p = min(p + max(1.0, len(b2) / len(b1)), c)
            replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:
            p = max(p - max(1.0, len(b1) / len(b2)), 0.0)
            replace(x)
            b2.remove(x)
            t2.append(x)
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.pop(0)
                replace(x)
            t1.append(x)
    return hits
