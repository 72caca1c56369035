"""Every point of a document in one table, the seeds of a point in one row."""

from collections.abc import Callable, Sequence

from .markup import Html, element, join, text
from .points import Document, Point, points_of, trace_names
from .rounded import number, seconds, size

Column = tuple[str, str, Callable[[Point], str | None]]
"""Heading, what it means, and the value of a point, None where it is unknown."""


def cells_table(document: Document) -> Html | None:
    """The table in a box of its own that scrolls; columns that nothing is known of are left out."""
    traces = [(trace, points_of(document, trace)) for trace in trace_names(document)]
    every = [point for _, points in traces for point in points]
    columns = [column for column in COLUMNS if any(column[2](point) for point in every)]
    if not every:
        return None
    head = [element("th", name, title=meaning, scope="col") for name, meaning, _ in columns]
    bodies = [_body(trace, points, columns) for trace, points in traces if points]
    table = element("table", element("thead", element("tr", *head)), *bodies, class_="cells")
    return element(
        "div",
        table,
        class_="box",
        tabindex="0",
        role="region",
        aria_label="Every policy and size",
    )


def columns_explained(document: Document) -> Html:
    """The headings of the columns that are there, with what they mean."""
    every = [p for trace in trace_names(document) for p in points_of(document, trace)]
    shown = [column for column in COLUMNS if any(column[2](point) for point in every)]
    entries = [
        join(element("dt", name), element("dd", meaning)) for name, meaning, _ in shown if meaning
    ]
    return element("dl", *entries, class_="facts") if entries else text("")


def _body(trace: str, points: Sequence[Point], columns: Sequence[Column]) -> Html:
    name = element("th", element("span", trace), colspan=len(columns), scope="rowgroup")
    ordered = sorted(points, key=lambda point: (point.size_bytes, point.dram_bytes))
    return element("tbody", element("tr", name), *(_row(point, columns) for point in ordered))


def _row(point: Point, columns: Sequence[Column]) -> Html:
    first, *others = [value(point) or "·" for _, _, value in columns]
    return element("tr", element("th", first, scope="row"), *(element("td", v) for v in others))


def _hits(point: Point) -> str:
    low, high = point.spread
    spread = f" ({100 * low:.1f}-{100 * high:.1f})" if high - low >= 0.0005 else ""
    return f"{100 * point.hit:.2f}{spread}"


def _percent(name: str) -> Callable[[Point], str | None]:
    return _mean(name, lambda value: f"{100 * value:.2f}")


def _mean(name: str, shown: Callable[[float], str]) -> Callable[[Point], str | None]:
    def value(point: Point) -> str | None:
        mean = point.mean(name)
        return None if mean is None else shown(mean)

    return value


def _of_tier(tier: str) -> Callable[[Point], str | None]:
    def value(point: Point) -> str | None:
        hit = point.tier_hit(tier)
        return None if hit is None or (tier == "nvme" and not point.nvme_bytes) else _hundred(hit)

    return value


def _of_nvme(value: Callable[[Point], str | None]) -> Callable[[Point], str | None]:
    """Nothing where there is no NVMe tier."""
    return lambda point: value(point) if point.nvme_bytes else None


def _hundred(value: float) -> str:
    return f"{100 * value:.2f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


COLUMNS: tuple[Column, ...] = (
    ("policy", "", lambda point: point.policy),
    ("DRAM", "space of the tier", lambda point: size(point.dram_bytes)),
    ("NVMe", "space of the tier", lambda p: size(p.nvme_bytes) if p.nvme_bytes else None),
    ("hits, %", "prefix hits: leading chunks found, of all asked for (seeds: least-most)", _hits),
    (
        "2nd half, %",
        "the same over the last half of the requests",
        _percent("prefix_hit_last_half"),
    ),
    ("DRAM, %", "hits served from DRAM", _of_tier("dram")),
    ("NVMe, %", "hits served from NVMe", _of_tier("nvme")),
    ("regret", "points below the best possible policy at the same bytes", _percent("regret")),
    ("gap, %", "of the way from LRU to the best possible policy", _percent("gap_closed")),
    (
        "holes",
        "points lost because a chunk before the one found was missing",
        _percent("hole_loss"),
    ),
    ("admitted", "chunks written to DRAM", _mean("chunk_writes", _whole)),
    ("NVMe writes", "chunks written to NVMe", _of_nvme(_mean("nvme_chunk_writes", _whole))),
    ("per hit", "bytes written to NVMe per byte hit", _mean("nvme_bytes_per_hit_byte", number)),
    ("TB/day", "written to NVMe", _mean("nvme_tb_per_day", number)),
    ("DWPD", "whole drives written a day", _mean("nvme_dwpd", number)),
    ("promoted", "chunks copied from NVMe to DRAM", _of_nvme(_mean("promotions", _whole))),
    ("in vain", "promoted, never hit there", _of_nvme(_mean("wasted_promotions", _whole))),
    ("prefill saved", "time on the accelerator", _mean("prefill_s_saved", seconds)),
    ("TTFT p50", "time to first token, median", _mean("ttft_p50_s", seconds)),
    ("TTFT p95", "time to first token, 95th percentile", _mean("ttft_p95_s", seconds)),
)
