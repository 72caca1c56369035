"""Two charts of how a size serves: where hits came from over time, and time to first token."""

from collections.abc import Mapping, Sequence
from typing import Any

from .choice import choose, same_size
from .markup import Html, element, join
from .points import DEFAULTS, Document, Point, online, points_of, tiers_text
from .rounded import seconds, share
from .svg import BOTTOM, UNUSED, Y_LABEL, area_key, axes, figure, path, share_scale, time_scale

Bins = Sequence[Mapping[str, Any]]

MAX_BARS = 6
"""Policies whose times are drawn."""

_BAR, _ROW, _HEAD = 15.0, 21.0, 24.0
_NAMES_END = 92.0
_BARS_END = 336.0
"""What is left beside the longest bar is for its number."""


def tiers_over_time(document: Document, trace: str, name: str) -> Html | None:
    """Hits by tier, stacked, of the recommended point's first seed; None without a timeline."""
    chosen = choose(points_of(document, trace))
    bins: Bins = (chosen.cells[0].get("timeline") or ()) if chosen else ()
    bins = [bin_ for bin_ in bins if bin_.get("hour") is not None]
    if chosen is None or len(bins) < 2 or not bins[-1]["hour"]:
        return None
    hours = [float(bin_["hour"]) for bin_ in bins]
    dram = [float(bin_.get("dram") or 0) for bin_ in bins]
    both = [below + float(bin_.get("nvme") or 0) for below, bin_ in zip(dram, bins, strict=True)]
    in_minutes = hours[-1] < 3
    times = [60 * hour if in_minutes else hour for hour in hours]
    x, y = time_scale(times[-1]), share_scale(max(both))
    lower, upper = (
        [(x(t), y(h)) for t, h in zip(times, hits, strict=True)] for hits in (dram, both)
    )
    floor = [(x(times[-1]), BOTTOM), (x(times[0]), BOTTOM)]
    drawing = [
        axes(x, y, "minutes" if in_minutes else "hours", Y_LABEL, UNUSED),
        path(lower + floor, "area dram", closed=True),
    ]
    legend = [area_key("area dram", "from DRAM")]
    if chosen.nvme_bytes:
        drawing.append(path(upper + lower[::-1], "area nvme", closed=True))
        legend.insert(0, area_key("area nvme", "from NVMe"))
    title = f"Where hits came from: {chosen.policy}, {tiers_text(chosen)}"
    words = (
        f"Hits go from {share(both[0])} to {share(both[-1])}, at most {share(max(both))}; "
        f"{share(sum(dram) / max(sum(both), 1e-9))} of them from DRAM."
    )
    return figure(name, title, words, drawing, legend, top=UNUSED)


def first_token(document: Document, trace: str, name: str) -> Html | None:
    """Bars of the median and the 95th percentile without a cache and with each policy at the
    recommended size; None when no times are known."""
    measured = points_of(document, trace)
    chosen = choose(measured)
    if chosen is None:
        return None
    points = _in_order(online(same_size(measured, chosen)), chosen)
    groups = [
        (words, rows)
        for words, field in (("median", "ttft_p50"), ("95th percentile", "ttft_p95"))
        if (rows := _rows(points, chosen, field))
    ]
    if not groups:
        return None
    longest = max(time for _, rows in groups for _, time in rows)
    drawing, top = [], 4.0
    for words, rows in groups:
        drawing.append(element("text", words, class_="axis", x=2, y=top + 13))
        top += _HEAD
        for n, (policy, time) in enumerate(rows):
            drawing.append(_bar(policy, time, longest, top, "none" if n == 0 else "with"))
            top += _ROW
        top += 8
    said = "; ".join(
        f"{words}: " + ", ".join(f"{policy} {seconds(time)}" for policy, time in rows)
        for words, rows in groups
    )
    title = f"Time to first token with {tiers_text(chosen)}, by the device model"
    return figure(name, title, said + ".", drawing, bottom=top)


def _in_order(points: Sequence[Point], chosen: Point) -> list[Point]:
    """The recommended one first, the default and LRU next, the others as they came."""

    def rank(point: Point) -> tuple[bool, bool, bool]:
        return point is not chosen, point.policy not in DEFAULTS, point.policy != "lru"

    return sorted(points, key=rank)[:MAX_BARS]


def _rows(points: Sequence[Point], chosen: Point, field: str) -> list[tuple[str, float]]:
    """Names and seconds, without a cache first; empty when either is unknown."""
    without = chosen.mean(f"{field}_no_cache_s")
    cached = [
        (point.policy, time) for point in points if (time := point.mean(f"{field}_s")) is not None
    ]
    return [("no cache", without), *cached] if without is not None and cached else []


def _bar(policy: str, time: float, longest: float, top: float, class_: str) -> Html:
    width = max(1.0, (_BARS_END - _NAMES_END) * time / longest) if longest > 0 else 1.0
    words = policy if len(policy) <= 12 else f"{policy[:11]}…"
    middle = top + _BAR / 2 + 4
    return join(
        element("text", words, class_="tick", x=_NAMES_END - 6, y=middle, text_anchor="end"),
        element("rect", class_=f"bar {class_}", x=_NAMES_END, y=top, width=width, height=_BAR),
        element("text", seconds(time), class_="value", x=_NAMES_END + width + 5, y=middle),
    )
