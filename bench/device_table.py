"""The device check's document for people: targets first, then what each section found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_SPREAD = ("_min", "_max")
_STYLES = {"failed": "red", "missed": "red", "met": "green"}


def table(document: Mapping[str, Any]) -> Group:
    environment = document["environment"]
    title = "Dry run on the CPU: no speed is judged" if document["dry_run"] else "Device check"
    return Group(
        _targets(document, title),
        *(part for section in document["sections"] for part in _section(section)),
        Text(f"\n{environment['device']}, {environment['cpu']}, {document['taken_s']:.0f} s"),
    )


def _targets(document: Mapping[str, Any], title: str) -> Table:
    view = Table("target", "measured", "limit", "", title=title, box=SIMPLE_HEAD)
    for section in document["sections"]:
        for target in section["targets"]:
            limit = f"{target['bound']} {target['limit']:.2f}"
            verdict = Text(target["verdict"], _STYLES.get(target["verdict"], ""))
            view.add_row(target["what"], f"{target['measured']:.3f}", limit, verdict)
    return view


def _section(section: Mapping[str, Any]) -> Iterator[Table | Text]:
    status = Text(section["status"], _STYLES.get(section["status"], ""))
    name = (section["name"], "bold")
    yield Text.assemble("\n", name, f" ({section['taken_s']:.1f} s) ", status)
    rows = section["rows"]
    if rows and "exact" in rows[0]:
        yield Text(f"{sum(row['exact'] for row in rows)} of {len(rows)} are exact")
    elif rows:
        yield _rows(rows)
    said = [section["error"], section["skipped"], *section["wrong"], *section["notes"]]
    yield from (Text(line.rstrip()) for line in said if line)


def _rows(rows: list[Mapping[str, Any]]) -> Table:
    """A ratio and its spread share a cell."""
    view = Table(box=SIMPLE_HEAD)
    for name in rows[0]:
        if not name.endswith(_SPREAD):
            view.add_column(name.removesuffix("_bytes").replace("_", " "))
    for row in rows:
        view.add_row(*(_cell(name, row) for name in row if not name.endswith(_SPREAD)))
    return view


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value, low, high = (row.get(name + suffix) for suffix in ("", *_SPREAD))
    if value is None:
        return ""
    if isinstance(value, float):
        return (
            f"{value:.3f}" if low is None or high is None else f"{value:.3f} ({low:.2f}-{high:.2f})"
        )
    return _size(value) if name.endswith("_bytes") else str(value)


def _size(num_bytes: int) -> str:
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} B"
