"""Two charts of what a size buys: hits over capacity, and hits against writes to NVMe."""

from collections.abc import Sequence

from .choice import choose, rated_dwpd
from .markup import Html, join
from .points import (
    Curve,
    Document,
    Point,
    budget_of,
    curve_of,
    knee_of,
    online,
    points_of,
    tiers_text,
)
from .rounded import number, share, size
from .svg import (
    LEFT,
    RIGHT,
    Y_LABEL,
    Scale,
    axes,
    beside,
    figure,
    key,
    line_key,
    marker,
    path,
    plain_scale,
    ring,
    ring_key,
    share_scale,
    size_scale,
    standing_lines,
    text_key,
)

_SIZE_WORDS = 58.0
"""Room for a size beside the last point of its line."""

_CURVES = (("optimal", "the best possible policy"), ("lru", "LRU, exact"))


def hit_curve(document: Document, trace: str, name: str) -> Html | None:
    """Hits over capacity on a log axis; None when there is nothing to draw."""
    curves = {
        policy: curve for policy, _ in _CURVES if (curve := curve_of(document, trace, policy))
    }
    measured = [point for point in online(points_of(document, trace)) if point.size_bytes]
    if not curves and not measured:
        return None
    drawn = [point for point in measured if not _lies_on(curves, point)]
    x, y = _scales(document, trace, curves, measured)
    drawing = [
        axes(x, y, "DRAM and NVMe together", Y_LABEL),
        *(_curve(curve, x, y, policy) for policy, curve in curves.items()),
        _lines(document, trace, x),
        *_markers(measured, drawn, x, y),
    ]
    legend = [line_key(f"curve {policy}", words) for policy, words in _CURVES if policy in curves]
    legend += [*_keys(measured, drawn), ring_key("recommended")] if measured else []
    title = "How many hits a size buys"
    return figure(name, title, _in_words(curves, measured), drawing, legend)


def hits_and_writes(document: Document, trace: str, name: str) -> Html | None:
    """One line per size through its policies; None where nothing was written to NVMe."""
    measured = [p for p in online(points_of(document, trace)) if p.nvme_bytes]
    daily = all(point.mean("nvme_tb_per_day") is not None for point in measured)
    placed = [
        (point, writes) for point in measured if (writes := _written(point, daily)) is not None
    ]
    if not placed:
        return None
    rated = _rated_tb(document, measured) if daily else None
    most = max(writes for _, writes in placed)
    reaches = rated is not None and rated <= 2 * most
    x = plain_scale(max(most, rated or 0) if reaches else most, LEFT, RIGHT - _SIZE_WORDS)
    y = share_scale(max(point.spread[1] for point in measured))
    unit = "TB written to NVMe a day" if daily else "chunks written to NVMe per chunk asked for"
    drawing = [axes(x, y, unit, Y_LABEL), *_size_lines(placed, x, y)]
    if rated is not None and reaches:
        drawing.append(standing_lines([(x(rated), "the drive's rating", "budget")]))
    names = series_of(document, trace)
    for point, writes in placed:
        words = f"{point.policy}, {tiers_text(point)}: {share(point.hit)}, {number(writes)} {unit}"
        drawing.append(marker(names.index(point.policy), x(writes), y(point.hit), words))
    words = "; ".join(
        f"{point.policy} with {tiers_text(point)}: {share(point.hit)} at {number(writes)}"
        for point, writes in placed[:12]
    )
    legend = [key(names.index(policy), policy) for policy in _policies(measured)]
    return figure(name, "What the hits cost in writes", f"{unit}: {words}.", drawing, legend)


def series_of(document: Document, trace: str) -> list[str]:
    """Policies in the order of their colours and markers, the same in every chart of a trace."""
    return _policies(online(points_of(document, trace)))


def _policies(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(point.policy for point in points))


def _lies_on(curves: dict[str, Curve], point: Point) -> bool:
    """LRU of one tier is what its curve says."""
    return point.policy == "lru" and not point.nvme_bytes and "lru" in curves


def _scales(
    document: Document, trace: str, curves: dict[str, Curve], measured: Sequence[Point]
) -> tuple[Scale, Scale]:
    """From where hits begin, or half of the smallest point, to where nothing more is to be had."""
    sizes = [float(point.size_bytes) for point in measured]
    lows, highs = [0.5 * size for size in sizes], list(sizes)
    hits = [point.spread[1] for point in measured]
    for curve in curves.values():
        first, last = float(curve.mean[0]), float(curve.mean[-1])
        lows.append(0.5 * (curve.size_for(0.9 * first + 0.1 * last) or float(curve.sizes[0])))
        highs.append(float(curve.sizes[-1]))
        hits.append(float(curve.high.max()))
    if budget := budget_of(document):
        highs.append(1.1 * budget.size_bytes)
        lows.append(0.9 * budget.size_bytes)
    if knee := knee_of(document, trace):
        highs.append(1.1 * knee["bytes"])
    return size_scale(max(1.0, min(lows)), max(highs)), share_scale(max(hits))


def _curve(curve: Curve, x: Scale, y: Scale, policy: str) -> Html:
    """The mean over the seeds, in a band from the lowest to the highest."""
    inside = [n for n, size_bytes in enumerate(curve.sizes) if size_bytes >= x.low]
    edge = [(x.low, curve.hit_at(x.low))] if curve.sizes[0] < x.low else []
    line = edge + [(float(curve.sizes[n]), float(curve.mean[n])) for n in inside]
    if curve.sizes[-1] < x.high:
        line.append((x.high, float(curve.mean[-1])))
    drawn = path([(x(s), y(hit)) for s, hit in line], f"curve {policy}")
    if float((curve.high - curve.low).max()) < 0.002:
        return drawn
    there = [(x(float(curve.sizes[n])), y(float(curve.low[n]))) for n in inside]
    back = [(x(float(curve.sizes[n])), y(float(curve.high[n]))) for n in reversed(inside)]
    return join(path(there + back, f"band {policy}", closed=True), drawn)


def _lines(document: Document, trace: str, x: Scale) -> Html:
    """The knee and the user's budget."""
    lines = []
    if knee := knee_of(document, trace):
        lines.append((x(knee["bytes"]), f"knee {size(knee['bytes'])}", "knee"))
    if budget := budget_of(document):
        words = f"your budget {size(budget.size_bytes)}"
        lines.append((x(budget.size_bytes), words, "budget"))
    return standing_lines(lines)


def _markers(measured: Sequence[Point], drawn: Sequence[Point], x: Scale, y: Scale) -> list[Html]:
    """Every point with the spread of its seeds, the recommended one in a ring."""
    names, chosen, marks = _policies(measured), choose(measured), []
    for point in drawn:
        at, (low, high) = x(point.size_bytes), point.spread
        if high - low >= 0.002:
            marks.append(path([(at, y(low)), (at, y(high))], "spread"))
        words = f"{point.policy}, {tiers_text(point)}: {share(point.hit)}"
        series = names.index(point.policy)
        marks.append(marker(series, at, y(point.hit), words, hollow=not point.nvme_bytes))
    if chosen is not None:
        marks.append(ring(x(chosen.size_bytes), y(chosen.hit), "recommended"))
    return marks


def _keys(measured: Sequence[Point], drawn: Sequence[Point]) -> list[Html]:
    """Of the policies that are drawn; hollow and full only where there are both."""
    names = _policies(measured)
    keys = [
        key(names.index(policy), policy, hollow=all(not p.nvme_bytes for p in drawn))
        for policy in _policies(drawn)
    ]
    if len({bool(point.nvme_bytes) for point in drawn}) > 1:
        keys += [text_key("full: DRAM and NVMe, hollow: DRAM alone")]
    return keys


def _written(point: Point, daily: bool) -> float | None:
    """TB a day, or chunks per reference where days are unknown."""
    if daily:
        return point.mean("nvme_tb_per_day")
    writes, refs = point.mean("nvme_chunk_writes"), point.mean("refs")
    return writes / refs if writes is not None and refs else None


def _rated_tb(document: Document, measured: Sequence[Point]) -> float | None:
    """TB a day that wear the drive as fast as it is made for, by what the points' writes wear."""
    rated = rated_dwpd(document)
    for point in measured:
        daily, worn = point.mean("nvme_tb_per_day"), point.mean("nvme_dwpd")
        if rated and daily and worn:
            return rated * daily / worn
    return None


def _size_lines(placed: Sequence[tuple[Point, float]], x: Scale, y: Scale) -> list[Html]:
    """Through the points of one size, with the size at its end; no two words on each other."""
    lines, taken = [], list[float]()
    for size_bytes in sorted({point.size_bytes for point, _ in placed}, reverse=True):
        line = sorted((w, point.hit) for point, w in placed if point.size_bytes == size_bytes)
        lines.append(path([(x(writes), y(hit)) for writes, hit in line], "same-size"))
        at, up = x(line[-1][0]), y(line[-1][1])
        if all(abs(up - other) > 12 for other in taken):
            taken.append(up)
            lines.append(beside(at, up + 4, size(size_bytes)))
    return lines


def _in_words(curves: dict[str, Curve], measured: Sequence[Point]) -> str:
    said = []
    for policy, words in _CURVES:
        if curve := curves.get(policy):
            first, last = float(curve.mean[0]), float(curve.mean[-1])
            ends = f"{size(float(curve.sizes[0]))} to {share(last)} at {size(curve.sizes[-1])}"
            said.append(f"{words}: from {share(first)} at {ends}")
    said += [f"{p.policy} with {tiers_text(p)}: {share(p.hit)}" for p in measured[:24]]
    return "; ".join(said) + "."
