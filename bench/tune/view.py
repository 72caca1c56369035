"""A document of `rootcellar tune` as tables on a terminal, one row per cell."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .rounded import count, size

_CAPTION = """\
Sizes for {}. Hits in % of references; late: of the last half.
Writes in chunks, to NVMe where there is one. p95: time to first token."""


def view(document: dict[str, Any]) -> Group:
    """A table for each trace, and what to buy or change in words."""
    tables = [_table(document, trace["trace"]) for trace in document["traces"]]
    return Group(*tables, Text(document["advice"]))


def _table(document: dict[str, Any], trace: str) -> Table:
    table = Table(title=trace, caption=_CAPTION.format(document["model"]["name"]), box=SIMPLE)
    table.add_column("policy", no_wrap=True)
    for heading in ("DRAM", "NVMe", "hits", "late", "of NVMe", "writes", "DWPD", "p95"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in document["cells"]:
        if cell["trace"] == trace:
            table.add_row(*_row(cell))
    return table


def _row(cell: dict[str, Any]) -> list[str]:
    tiered = bool(cell["nvme_bytes"])
    return [
        f"{cell['policy']} #{cell['seed']}" if cell["seed"] else cell["policy"],
        size(cell["dram_bytes"]),
        size(cell["nvme_bytes"]) if tiered else "",
        _percent(cell["prefix_hit"]),
        _percent(cell["prefix_hit_last_half"]),
        _percent(cell["hits_by_tier"]["nvme"]) if tiered else "",
        count(cell["nvme_chunk_writes"] if tiered else cell["chunk_writes"]),
        "" if cell["nvme_dwpd"] is None else f"{cell['nvme_dwpd']:.1f}",
        f"{cell['ttft_p95_s']:.2f} s",
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"
