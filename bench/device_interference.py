"""Section: what write-down at full rate does to a decode loop beside it.

Blocks of steps take turns: with write-down, without, and without once more, which shows how much
of a difference is noise. A step is what an engine waits for: launch, poll, and the end of its
graph. Chunks are written to pinned slots from pages that no step touches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..tiers.device import device_of
from ..tiers.movers import ChunkCopy
from ..tiers.transfer import CopyJob, Transfer
from .device_budget import Part
from .device_clock import Work
from .device_decode import DecodeLoop
from .device_link import STAGING_BYTES
from .device_pages import noise
from .device_section import Bound, Findings, Row, Site, Target, compared
from .device_slots import Form, slots
from .timing import interleave, paused_gc, percentile

OFF, ON, CONTROL, ALONE = "off", "on", "off again", "write-down alone"
MEDIAN_TARGET = 1.01
P99_TARGET = 1.03

_FORM = Form(chunk_bytes=32 << 20, page_bytes=32 << 10)
_JOBS = 4
"""So that there is always one that was asked for before the step under way."""
_LEAD_STEPS = 3
"""Of a block, not counted: write-down gets going, and what the last block left in caches goes."""


def measure(site: Site, part: Part) -> Findings:
    with slots(site.device, site.scale.link_bytes) as in_slots:
        loop = DecodeLoop(site.scale.decode, site.generator())
        writer = _Writer(site, in_slots)
        try:
            blocks = _take_rounds(loop, writer, site, part)
        finally:
            writer.close()  # before the slots go
    found = findings_of(blocks)
    found.notes.append(f"{loop.shape.num_layers} layers, batch {loop.shape.batch}")
    return found


@dataclass(frozen=True, slots=True)
class Block:
    """Steps of one kind in a row, and what was written meanwhile."""

    steps_s: list[float]
    written_bytes: int


class _Writer:
    """Write-down that never runs out of chunks, as long as it is told to go on."""

    def __init__(self, site: Site, in_slots: torch.Tensor) -> None:
        self.written_bytes = 0
        memory = noise(len(in_slots), site.generator())
        copies = _FORM.copies(memory, in_slots, site.seed)
        each = -(-len(copies) // _JOBS)
        self._idle = [copies[at : at + each] for at in range(0, len(copies), each)]
        self._under_way: list[tuple[CopyJob, list[ChunkCopy]]] = []
        self._transfer = Transfer(device_of([memory]), staging_bytes=STAGING_BYTES)

    def go_on(self) -> None:
        """Poll, and write again what is written."""
        self.poll()
        while self._idle:
            copies = self._idle.pop()
            self._under_way.append((self._transfer.store(copies), copies))

    def poll(self) -> None:
        ended = self._transfer.poll()
        for job, copies in [pair for pair in self._under_way if pair[0] in ended]:
            if job.error is not None:
                raise job.error
            self._under_way.remove((job, copies))
            self._idle.append(copies)
            self.written_bytes += job.num_bytes

    def finish(self) -> None:
        """Wait for what is under way."""
        self._transfer.wait([job for job, _ in self._under_way])
        self.poll()

    def close(self) -> None:
        self._transfer.close()


def _take_rounds(
    loop: DecodeLoop, writer: _Writer, site: Site, part: Part
) -> dict[str, list[Block]]:
    steps = site.scale.block_steps
    rivals: dict[str, Callable[[], Block]] = {
        OFF: partial(_block, loop, writer, writer.poll, steps),
        ON: partial(_block, loop, writer, writer.go_on, steps),
        CONTROL: partial(_block, loop, writer, writer.poll, steps),
        ALONE: partial(_alone, writer, site.scale.link_bytes),
    }
    blocks: dict[str, list[Block]] = {name: [] for name in rivals}
    with paused_gc():
        for number in part.rounds(site.scale.most_rounds):
            for name, taken in interleave(rivals, 1, site.seed + number).items():
                blocks[name] += taken
    return blocks


def _block(loop: DecodeLoop, writer: _Writer, each_step: Work, num_steps: int) -> Block:
    for _ in range(_LEAD_STEPS):
        _step_s(loop, each_step)
    before_bytes = writer.written_bytes
    steps_s = [_step_s(loop, each_step) for _ in range(num_steps)]
    written_bytes = writer.written_bytes - before_bytes
    writer.finish()  # nothing of it is left to the next block
    return Block(steps_s, written_bytes)


def _step_s(loop: DecodeLoop, each_step: Work) -> float:
    start_s = time.perf_counter()
    loop.step()
    each_step()
    loop.wait()
    return time.perf_counter() - start_s


def _alone(writer: _Writer, num_bytes: int) -> Block:
    """Write-down without a step: one long one, as far as the clock is concerned."""
    before_bytes, start_s = writer.written_bytes, time.perf_counter()
    while writer.written_bytes < before_bytes + num_bytes:
        writer.go_on()
    block = Block([time.perf_counter() - start_s], writer.written_bytes - before_bytes)
    writer.finish()
    return block


def findings_of(blocks: Mapping[str, Sequence[Block]]) -> Findings:
    """Medians of blocks are compared within their round, the slowest steps over all rounds."""
    rows = [_row(name, blocks[name], blocks[OFF]) for name in (OFF, ON, CONTROL)]
    on = rows[1]
    targets = [
        Target("median step with write-down", on["to_off"], Bound.AT_MOST, MEDIAN_TARGET),
        Target("p99 step with write-down", on["p99_to_off"], Bound.AT_MOST, P99_TARGET),
    ]
    alone = dict.fromkeys(rows[0]) | {"measured": ALONE, "written_gb_per_s": _speed(blocks[ALONE])}
    return Findings([*rows, alone], targets)


def _row(name: str, blocks: Sequence[Block], off: Sequence[Block]) -> Row:
    steps_s, off_s = _steps(blocks), _steps(off)
    ratios = [
        statistics.median(block.steps_s) / statistics.median(other.steps_s)
        for block, other in zip(blocks, off, strict=True)
    ]
    return {
        "measured": name,
        "steps": len(steps_s),
        "median_ms": statistics.median(steps_s) * 1e3,
        "p99_ms": percentile(steps_s, 99) * 1e3,
        **compared("to_off", ratios),
        "p99_to_off": percentile(steps_s, 99) / percentile(off_s, 99),
        "written_gb_per_s": _speed(blocks),
    }


def _steps(blocks: Sequence[Block]) -> list[float]:
    return [seconds for block in blocks for seconds in block.steps_s]


def _speed(blocks: Sequence[Block]) -> float:
    return sum(block.written_bytes for block in blocks) / sum(_steps(blocks)) / 1e9
