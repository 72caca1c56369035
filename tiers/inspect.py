"""What is in a store, from its index and file names; also while another process has it open."""

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb
from rich.table import Table

from .chunk_file import CHUNKS, DROPPED, FORMAT_VERSION, INDEX, SUFFIX, TMP, folder_name
from .directory import holder, require_store
from .headers import read_headers
from .index import Row, load


def inspect_store(root: Path) -> dict[str, Any]:
    """Changes nothing. Raises ValueError if `root` is no store, FormatVersionError for another
    format. Ages are seconds since the last use; a chunk written a moment ago may be missing."""
    require_store(root)
    by_namespace: defaultdict[str, list[Row]] = defaultdict(list)
    for row in _rows(root):
        by_namespace[folder_name(row.namespace, row.generation)].append(row)
    now_s = time.time()
    return {
        "path": str(root),
        "format_version": FORMAT_VERSION,
        "held_by_pid": holder(root),
        "bytes": _tree_bytes(root / CHUNKS),
        "dropped_bytes": _tree_bytes(root / DROPPED),
        "temporary_bytes": _tree_bytes(root / TMP),
        "namespaces": [_summary(name, rows, now_s) for name, rows in sorted(by_namespace.items())],
    }


def table(result: dict[str, Any]) -> Table:
    held = result["held_by_pid"]
    title = f"{result['path']}, {'open in process ' + str(held) if held else 'not open'}"
    columns = ("namespace", "chunks", "tokens", "MiB", "hits", "never hit", "used", "oldest use")
    table = Table(*columns, title=title)
    for space in result["namespaces"]:
        table.add_row(
            f"{space['namespace'][:12]}…",
            f"{space['chunks']:,}",
            f"{space['tokens']:,}",
            f"{space['bytes'] / 2**20:,.1f}",
            f"{space['hits']:,}",
            f"{space['chunks_never_hit']:,}",
            f"{_age(space['newest_use_s'])} ago",
            f"{_age(space['oldest_use_s'])} ago",
        )
    table.caption = f"{result['bytes'] / 2**20:,.1f} MiB in chunk files"
    if result["dropped_bytes"]:
        table.caption += f", {result['dropped_bytes'] / 2**20:,.1f} MiB being reclaimed"
    return table


def _rows(root: Path) -> list[Row]:
    """Rows of the files that are there; those the index does not know are read from headers."""
    paths = {str(path) for path in (root / CHUNKS).rglob(f"*{SUFFIX}")}
    known = {path: row for row in _index(root) if (path := _path(root, row)) in paths}
    strangers = sorted(paths - known.keys())
    return [*known.values(), *filter(None, read_headers(str(root), strangers))]


def _index(root: Path) -> Sequence[Row]:
    try:
        return load(root / INDEX).rows
    except (lmdb.Error, OSError):
        return []


def _path(root: Path, row: Row) -> str:
    name = row.key.hex()
    folder = folder_name(row.namespace, row.generation)
    return str(root / CHUNKS / folder / name[:2] / f"{name}{SUFFIX}")


def _summary(name: str, rows: list[Row], now_s: float) -> dict[str, Any]:
    ages_s = [max(0.0, now_s - row.last_use_s) for row in rows]
    return {
        "namespace": name.partition("-")[0],
        "generation": rows[0].generation,
        "chunks": len(rows),
        "tokens": sum(row.num_tokens for row in rows),
        "bytes": sum(row.file_bytes for row in rows),
        "payload_bytes": sum(row.payload_bytes for row in rows),
        "hits": sum(row.hits for row in rows),
        "chunks_never_hit": sum(row.hits == 0 for row in rows),
        "newest_use_s": min(ages_s),
        "oldest_use_s": max(ages_s),
    }


def _tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _age(seconds: float) -> str:
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"
