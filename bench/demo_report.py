"""What the demo found, as rows, as one JSON-able report and as tables for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..connector.served import Served
from .demo_serving import Answer

SOURCES = ("hbm", "dram", "nvme", "computed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One request, answered without and with the cache. Counts are prompt tokens, times ms."""

    label: str
    hbm: int
    dram: int
    nvme: int
    computed: int
    uncached_ms: float
    cached_ms: float
    identical: bool

    @classmethod
    def of(cls, label: str, uncached: Answer, cached: Answer, served: Served | None) -> Self:
        assert served is not None
        return cls(
            label=label,
            **{source: getattr(served, source) for source in SOURCES},
            uncached_ms=1000 * uncached.ttft_s,
            cached_ms=1000 * cached.ttft_s,
            identical=uncached.reply == cached.reply,
        )

    @property
    def source(self) -> str:
        """Where most of the prompt came from; the request's time counts for that source."""
        return max(SOURCES, key=lambda source: getattr(self, source))


def report_of(rows: Sequence[Row], restart: dict[str, Any]) -> dict[str, Any]:
    """Totals and medians; a median over no request is None.

    ttft_ms: time to first token, of all requests without the cache, and with it by source.
    speedup: median over a source's requests of their time without the cache over that with it.
    """
    times: dict[str, float | None] = {"uncached_p50": _median([r.uncached_ms for r in rows])}
    speedup: dict[str, float | None] = {}
    for source in SOURCES:
        mine = [row for row in rows if row.source == source]
        times[f"{source}_p50"] = _median([row.cached_ms for row in mine])
        speedup[source] = _median([row.uncached_ms / row.cached_ms for row in mine])
    return {
        "requests": len(rows),
        "tokens": {source: sum(getattr(row, source) for row in rows) for source in SOURCES},
        "ttft_ms": times,
        "speedup": speedup,
        "outputs_identical": all(row.identical for row in rows),
        "restart": restart,
    }


def succeeded(report: dict[str, Any]) -> bool:
    """Whether every output token was the same, before and after the restart."""
    return bool(report["outputs_identical"] and report["restart"]["outputs_identical"])


def rows_table(rows: Sequence[Row]) -> Table:
    """One line per request so far, for a live display."""
    table = Table(title="prompt tokens by source, and time to first token in ms", box=SIMPLE_HEAD)
    table.add_column("request", no_wrap=True)
    for name in (*SOURCES, "no cache", "cached", "faster", "same"):
        table.add_column(name, justify="right")
    for row in rows:
        counts = [str(getattr(row, source) or "·") for source in SOURCES]
        times = [f"{row.uncached_ms:.0f}", f"{row.cached_ms:.0f}"]
        faster = f"{row.uncached_ms / row.cached_ms:.1f}x"
        table.add_row(row.label, *counts, *times, faster, "yes" if row.identical else "NO")
    return table


def summary_table(report: dict[str, Any]) -> Table:
    """Totals by source, and what was found after the restart."""
    tokens, times = report["tokens"], report["ttft_ms"]
    restart = report["restart"]
    total = sum(tokens.values()) or 1
    table = Table(title=f"{report['requests']} requests, {report['model']}")
    for name in ("source", "prompt tokens", "share", "ttft, median", "faster"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for source in SOURCES:
        table.add_row(
            source,
            str(tokens[source]),
            f"{tokens[source] / total:.0%}",
            _shown(times[f"{source}_p50"], ".0f", " ms"),
            _shown(report["speedup"][source], ".1f", "x"),
        )
    table.add_row("without cache", "", "", _shown(times["uncached_p50"], ".0f", " ms"), "")
    table.add_section()
    table.add_row("new process, nvme", str(restart["nvme_tokens"]), "", "", "")
    same = succeeded(report)
    table.caption = "every output token is the same" if same else "OUTPUTS DIFFER"
    return table


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 2) if values else None


def _shown(value: float | None, form: str, unit: str) -> str:
    return "·" if value is None else f"{value:{form}}{unit}"
