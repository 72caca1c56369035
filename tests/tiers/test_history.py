from collections import Counter

import pytest

from rootcellar.admission.base import Tier
from rootcellar.tiers.history import WhyNot

A, B, C = (bytes([number]) * 32 for number in range(3))


def test_reasons_are_counted_and_the_oldest_is_forgotten() -> None:
    why_not = WhyNot(max_entries=2)
    for key in (A, B, A, C):
        why_not.record([key], "nvme is full")
    assert why_not.counts == Counter({"nvme is full": 4})
    assert why_not.reason(B) == "never seen"
    assert why_not.reason(A) == why_not.reason(C) == "nvme is full"


@pytest.mark.parametrize(
    ("seconds", "age"),
    [(0, "0 s"), (12, "12 s"), (119, "119 s"), (150, "2 min"), (7300, "2 h"), (200_000, "2 d")],
)
def test_an_eviction_says_how_long_ago_it_was(
    monkeypatch: pytest.MonkeyPatch, seconds: float, age: str
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    why_not = WhyNot()
    why_not.evicted(A, Tier.NVME)
    now_s += seconds
    assert why_not.reason(A) == f"evicted from nvme {age} ago"
    assert why_not.counts == Counter({"evicted from nvme": 1})


def test_what_a_policy_says_is_told_and_not_counted_apart() -> None:
    why_not = WhyNot()
    said = [why_not.refused([key], f"prefix of {n} chunks") for n, key in enumerate((A, B))]
    assert said == [why_not.reason(A), why_not.reason(B)]
    assert why_not.reason(B) == "refused by admission: prefix of 1 chunks"
    assert why_not.counts == Counter({"refused by admission": 2})


def test_after_a_change_of_namespace_what_was_known_says_so() -> None:
    why_not = WhyNot(max_entries=2)
    why_not.record([A], "nvme is full")
    why_not.change_namespace([B])
    assert [why_not.reason(key) for key in (A, B, C)] == ["namespace changed"] * 2 + ["never seen"]
    why_not.change_namespace([C, A])
    assert why_not.reason(C) == "namespace changed"
    assert why_not.reason(B) == "never seen"
    assert why_not.counts == Counter({"nvme is full": 1})
