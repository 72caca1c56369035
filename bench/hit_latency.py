"""What a hit costs: from DRAM into pages, from NVMe around the page cache, and what a miss costs.

Next to each, in the same rounds: raw reads of the same files into the same memory, and copies of
the same bytes. NVMe hits are measured for every IO backend, under an engine's thread that
is idle, that runs pure Python flat out, and that lets go of the interpreter lock often.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from ..tiers.chunk_file import supports_o_direct
from ..tiers.config import IoKind
from .engine_thread import on_cores, split_cores
from .hit_field import open_field
from .hit_lookups import measure_lookups
from .hit_rivals import Rival, What, open_rivals
from .hit_rows import Rounds, rows_of
from .hit_stores import Chunks, layout_of
from .raw_io import build_page_loop
from .timing import environment, interleave, paused_gc

_CAPTION = (
    "Latencies are of a request for `depth` chunks. Ratios are of bytes per second, medians over "
    "rounds of ratios within a round: to raw preadv, to one memcpy, to a loop of memcpy per page "
    "in C. engine: the speed that the engine thread keeps."
)


class Size(NamedTuple):
    """How much run() measures."""

    rounds: int
    round_bytes: int
    round_chunks: int


FULL = Size(rounds=5, round_bytes=256 << 20, round_chunks=128)
QUICK = Size(rounds=2, round_bytes=64 << 20, round_chunks=16)
"""Takes well under half a minute: enough to see that it works, not how fast."""


def run(
    directory: Path | None = None,
    *,
    chunk_bytes: Sequence[int] = (1 << 20, 32 << 20),
    depths: Sequence[int] = (1, 4),
    backends: Sequence[IoKind] = ("threads", "process"),
    rounds: int = FULL.rounds,
    round_bytes: int = FULL.round_bytes,
    round_chunks: int = FULL.round_chunks,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure in a temporary directory under `directory` (the current one), then remove it.

    round_bytes, round_chunks: what each rival moves per round, whichever is less, but at least one
    request. Takes up to four times round_bytes of memory and, where links can be made, once of
    disk. progress: called with (done, total) after every round.

    Returns a JSON document; in its rows a number that does not apply is None. ValueError for a
    wrong argument, OSError when the disk cannot do it.
    """
    where = Path() if directory is None else directory
    _check(where, chunk_bytes, depths, backends, rounds)
    tick = _ticker(progress, len(chunk_bytes) * len(depths) * (1 + rounds))
    seeds, rows = itertools.count(seed), list[dict[str, Any]]()
    engine, others = split_cores()
    with (
        on_cores(others),  # where everything starts that is not the engine's thread
        tempfile.TemporaryDirectory(prefix=".rootcellar-bench-", dir=where) as name,
    ):
        folder = Path(name)
        page_loop, o_direct = build_page_loop(folder), supports_o_direct(folder)
        for size in chunk_bytes:
            num_chunks = max(*depths, min(round_chunks, round_bytes // size))
            chunks = Chunks.of_size(size, seed)
            with (
                tempfile.TemporaryDirectory(dir=folder) as place,
                open_field(Path(place), chunks, num_chunks, depths, backends, seed) as field,
            ):
                for depth in depths:
                    with open_rivals(field, depth, page_loop) as rivals, on_cores(engine):
                        taken = _take_rounds(rivals, rounds, seeds, tick)
                    rows += rows_of(taken, size, depth)
        lookups = measure_lookups(folder / "lookups", rounds, seed)
    return {
        "benchmark": "hit-latency",
        "environment": environment(),
        "seed": seed,
        "workload": {"rounds": rounds, "round_bytes": round_bytes, "round_chunks": round_chunks},
        "notes": _notes(o_direct, page_loop is not None),
        "rows": rows,
        "lookups": lookups,
    }


def table(result: dict[str, Any]) -> Group:
    """Hits and yardsticks, one section per chunk size and depth; then lookups, then notes."""
    environment = result["environment"]
    view = Table(title="Hit latency", caption=_CAPTION, box=SIMPLE_HEAD)
    view.add_column("measured", no_wrap=True)
    for heading in ("p50 us", "p99 us", "GB/s", "raw", "memcpy", "pages", "engine"):
        view.add_column(heading, justify="right", no_wrap=True)
    last: tuple[int, int] | None = None
    for row in result["rows"]:
        group = (row["chunk_bytes"], row["depth"])
        if group != last:
            view.add_section()
            size = f"{row['chunk_bytes'] / (1 << 20):g} MiB"
            view.add_row(f"[bold]{size}, depth {row['depth']}[/]")
        view.add_row(*_cells(row))
        last = group
    lookups = Table("operation", title="A prompt of 100,000 tokens, microseconds per call")
    lookups.add_column("p50", justify="right")
    lookups.add_column("p99", justify="right")
    for row in result["lookups"]:
        lookups.add_row(row["operation"], f"{row['p50']:.0f}", f"{row['p99']:.0f}")
    ran_on = f"{environment['cpu']}, {environment['cores']} cores, Python {environment['python']}"
    return Group(view, lookups, ran_on, *(f"note: {note}" for note in result["notes"]))


def _check(
    where: Path,
    chunk_bytes: Sequence[int],
    depths: Sequence[int],
    backends: Sequence[str],
    rounds: int,
) -> None:
    if not where.is_dir():
        raise ValueError(f"directory is {where}, must be an existing directory")
    for size in chunk_bytes:
        layout_of(size)
    if not depths or min(depths) < 1:
        raise ValueError(f"depths are {tuple(depths)}, must be at least 1")
    if not backends or not set(backends) <= set(get_args(IoKind)):
        raise ValueError(f"backends are {tuple(backends)}, must be of {get_args(IoKind)}")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}, must be at least 1")


def _take_rounds(
    rivals: dict[What, Rival], rounds: int, seeds: Iterator[int], tick: Callable[[], None]
) -> Rounds:
    """Every rival once per round. A first round, which touches everything, is not counted."""
    named = {"/".join(what): rival for what, rival in rivals.items()}
    taken: Rounds = {what: [] for what in rivals}
    with paused_gc():
        for number in range(1 + rounds):
            for name, samples in interleave(named, 1, next(seeds)).items():
                taken[What(*name.split("/"))] += samples if number else []
            tick()
    return taken


def _ticker(progress: Callable[[int, int], None] | None, total: int) -> Callable[[], None]:
    steps = itertools.count(1)

    def tick() -> None:
        if progress is not None:
            progress(next(steps), total)

    return tick


def _notes(o_direct: bool, has_page_loop: bool) -> list[str]:
    notes: list[str] = []
    if not o_direct:
        notes.append("no O_DIRECT here: NVMe hits and raw reads go through the page cache")
    if not has_page_loop:
        notes.append("no C compiler here: DRAM hits are not compared with a loop of memcpy by page")
    if len(os.sched_getaffinity(0)) == 1:
        notes.append("one core only: the IO side shares it with the engine's thread")
    return notes


def _cells(row: dict[str, Any]) -> list[str]:
    ratios = [row[name] for name in ("to_raw", "to_memcpy", "to_page_loop", "engine_keeps")]
    what = [row["measured"], row["backend"], row["engine"]]
    return [
        "  " + ", ".join(filter(None, what)),
        f"{row['p50']:,.0f}",
        f"{row['p99']:,.0f}",
        _number(row["gb_per_s"]),
        *map(_number, ratios),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
