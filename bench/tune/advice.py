"""What to buy or change, in plain words: one paragraph from the document of `rootcellar tune`.

Every sentence is left out when its numbers are unknown.
"""

from collections.abc import Iterator, Sequence
from math import ceil

from .choice import SAME, best_hit, choose, fits, lru_hit, price, rated_dwpd, same_size
from .points import (
    Document,
    Point,
    budget_of,
    curve_of,
    knee_of,
    online,
    points_of,
    tiers_text,
    trace_facts,
    trace_names,
)
from .rounded import count, number, points, seconds, share, size

WORTHLESS = 0.02
"""Where not even so many references return, there is nothing to cache."""


NOTHING_MEASURED = "There is nothing to advise on: no policy was measured that can be run."


def advise(document: Document) -> str:
    """One paragraph. Several traces get the gist of each, a single one gets all there is."""
    traces = trace_names(document)
    if len(traces) == 1:
        return advise_trace(document, traces[0])
    chosen = [(trace, choose(points_of(document, trace))) for trace in traces]
    parts = [f"{name}: {_in_short(document, name, point)}" for name, point in chosen if point]
    return " ".join(parts) or NOTHING_MEASURED


def advise_trace(document: Document, trace: str) -> str:
    """The same of one trace, with everything that is known."""
    chosen = choose(points_of(document, trace))
    if chosen is None:
        return NOTHING_MEASURED
    return " ".join(_in_full(document, trace, chosen))


def _in_short(document: Document, trace: str, chosen: Point) -> str:
    if _nothing_returns(document, trace, chosen):
        return _nothing(document, trace, chosen)
    text = f"{share(chosen.hit)} hits with {tiers_text(chosen)} and policy {chosen.policy}"
    if best := best_hit(document, trace, chosen):
        text += f", {share(chosen.hit / best)} of the best possible there"
    if knee := knee_of(document, trace):
        text += f"; the knee is at {size(knee['bytes'])}"
    return " ".join([f"{text}.", *_wear(document, chosen)])


def _in_full(document: Document, trace: str, chosen: Point) -> Iterator[str]:
    if _nothing_returns(document, trace, chosen):
        yield _nothing(document, trace, chosen)
        return
    measured = points_of(document, trace)
    yield _hits(document, trace, chosen)
    yield from _against_lru(document, trace, chosen)
    yield from _budget(document, measured, chosen)
    yield from _sizes(document, trace, measured, chosen)
    yield from _knee(document, trace)
    yield from _wear(document, chosen)
    yield from _fewer_writes(document, measured, chosen)
    yield from _times(chosen)


def _nothing_returns(document: Document, trace: str, chosen: Point) -> bool:
    endless = trace_facts(document, trace).get("infinite_hit")
    return max(chosen.hit, chosen.hit if endless is None else endless) < WORTHLESS


def _nothing(document: Document, trace: str, chosen: Point) -> str:
    endless = trace_facts(document, trace).get("infinite_hit")
    if endless is None:
        return (
            f"Nothing is worth buying: no size that was measured serves over {share(chosen.hit)}."
        )
    most = f"at most {share(endless)}" if endless else "none"
    return (
        f"Nothing is worth buying: this traffic hardly repeats itself, and even an endless cache "
        f"would serve {most} of it."
    )


def _hits(document: Document, trace: str, chosen: Point) -> str:
    text = f"With {tiers_text(chosen)}, policy {chosen.policy} serves {share(chosen.hit)}"
    text += " of all chunks asked for"
    low, high = chosen.spread
    if high - low >= 0.001:
        text += f" ({_range(low, high)} over {len(chosen.cells)} seeds)"
    endless = trace_facts(document, trace).get("infinite_hit")
    if best := best_hit(document, trace, chosen):
        text += f", {share(chosen.hit / best)} of what the best possible policy would at that size"
    elif endless:
        text += f", {share(min(1, chosen.hit / endless))} of what an endless cache would"
    return text + "."


def _range(low: float, high: float) -> str:
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def _against_lru(document: Document, trace: str, chosen: Point) -> Iterator[str]:
    lru = lru_hit(document, trace, chosen)
    if lru is None or chosen.policy == "lru":
        return
    if abs(chosen.hit - lru) <= SAME:
        yield "LRU does as well at that size."
    elif chosen.hit < lru:
        yield f"LRU would serve {share(lru)} there."
    else:
        yield f"LRU would serve {share(lru)} there{_as_much_space(document, trace, chosen)}."


def _as_much_space(document: Document, trace: str, chosen: Point) -> str:
    """How much more a single tier under LRU would need for the same hits."""
    curve = curve_of(document, trace, "lru")
    if curve is None:
        return ""
    need = curve.size_for(chosen.hit)
    if need is None:
        return " and cannot serve as much at any size"
    times = need / chosen.size_bytes
    return (
        f" and needs {number(round(times, 1))} times the space for as much" if times > 1.2 else ""
    )


def _budget(document: Document, measured: Sequence[Point], chosen: Point) -> Iterator[str]:
    """The best that was measured within what the user said there is."""
    budget = budget_of(document)
    if budget is None or fits(chosen, budget):
        return
    within = [point for point in online(measured) if fits(point, budget)]
    if within:
        best = max(within, key=lambda point: point.hit)
        taking = "" if tiers_text(best) == tiers_text(budget) else f" with {tiers_text(best)}"
        yield f"Your {tiers_text(budget)} reach {share(best.hit)}: policy {best.policy}{taking}."


def _sizes(
    document: Document, trace: str, measured: Sequence[Point], chosen: Point
) -> Iterator[str]:
    """What the sizes beside it that were measured give or take, whatever the policy."""
    dearer = [point for point in online(measured) if price(point) > price(chosen)]
    cheaper = [point for point in online(measured) if price(point) < price(chosen)]
    if dearer:
        best = min(dearer, key=lambda point: (-point.hit, price(point)))
        yield _more(best.hit - chosen.hit, tiers_text(best), tiers_text(max(dearer, key=price)))
    elif (curve := curve_of(document, trace, "lru")) and not knee_of(document, trace):
        gain = curve.hit_at(2 * chosen.size_bytes) - curve.hit_at(chosen.size_bytes)
        yield f"Twice the space would bring LRU {points(gain)} more."
    if cheaper:
        near = max(price(point) for point in cheaper)
        best = min((p for p in cheaper if price(p) == near), key=lambda point: -point.hit)
        yield f"{tiers_text(best)} would cost {points(max(0.0, chosen.hit - best.hit))}."


def _more(gain: float, tiers: str, largest: str) -> str:
    if gain <= SAME:
        return f"Spending more is not worth it: up to {largest} it brings less than half a point."
    return f"{tiers} would bring only {points(gain)} more."


def _knee(document: Document, trace: str) -> Iterator[str]:
    if knee := knee_of(document, trace):
        yield (
            f"The knee is at {size(knee['bytes'])} ({count(knee['tokens'])} tokens), where LRU "
            f"reaches {share(knee['hit_share'])} of what an endless cache would; doubling from "
            f"there brings {points(knee['slope_past'])}."
        )


def _wear(document: Document, chosen: Point) -> Iterator[str]:
    daily, worn = chosen.mean("nvme_tb_per_day"), chosen.mean("nvme_dwpd")
    if not chosen.nvme_bytes or daily is None:
        return
    text = f"It writes {number(daily)} TB a day to NVMe"
    rated = rated_dwpd(document)
    if worn is None:
        yield text + "."
    elif rated is None:
        yield f"{text}, {number(worn)} drive writes a day."
    elif worn <= rated:
        yield f"{text}, {number(worn)} drive writes a day of the {number(rated)} it is rated for."
    else:
        drives = ceil(worn / rated * ((document.get("device") or {}).get("nvme_drives") or 1))
        yield (
            f"{text}, {number(worn)} drive writes a day where {number(rated)} is what the drive is "
            f"rated for: it takes {drives} drives or a write budget."
        )


def _fewer_writes(document: Document, measured: Sequence[Point], chosen: Point) -> Iterator[str]:
    """For a drive that wears out: the best other policy at that size that halves the writes."""
    worn, rated = chosen.mean("nvme_dwpd"), rated_dwpd(document)
    mine = _writes(chosen)
    if worn is None or rated is None or worn <= rated or not mine:
        return
    others = [point for point in online(same_size(measured, chosen)) if _writes(point) is not None]
    halving = [point for point in others if 2 * (_writes(point) or 0) <= mine]
    best = max(halving, key=lambda point: point.hit, default=None)
    if best is not None and best.hit >= 0.8 * chosen.hit:
        saved = share(1 - (_writes(best) or 0) / mine)
        cost = points(max(0.0, chosen.hit - best.hit))
        yield f"Policy {best.policy} would write {saved} less and cost {cost} of hits."


def _writes(point: Point) -> float | None:
    return point.mean("nvme_chunk_writes")


def _times(chosen: Point) -> Iterator[str]:
    """By the device model: the slowest requests, and the accelerator's time."""
    saved, total = chosen.mean("prefill_s_saved"), chosen.mean("prefill_s_total")
    without, cached = chosen.mean("ttft_p95_no_cache_s"), chosen.mean("ttft_p95_s")
    said = []
    if without and cached is not None and cached < 0.95 * without:
        change = f"falls from {seconds(without)} to {seconds(cached)}"
        said.append(f"time to first token at the 95th percentile {change}")
    elif without and cached is not None:
        said.append("time to first token at the 95th percentile hardly changes")
    if saved is not None and total:
        said.append(f"{share(saved / total)} of all prefill time is saved")
    if said:
        yield f"By the device model, {' and '.join(said)}."
