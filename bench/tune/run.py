"""Traces in, one document out; page.py and view.py show it.

Every trace is loaded once for each seed, and replayed for each policy and capacity.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from .advice import advise
from .budget import NO_BUDGET, Budget
from .cells import Bounds, describe
from .contenders import Contender, Task, contender
from .counts import TierCounts
from .curves import Curves
from .device import Device
from .loading import load_trace, no_progress
from .models import ModelShape
from .sizes import Capacity, Sizes
from .stretch import Progress, Stretch
from .trace import Trace

Document = dict[str, Any]

MOST_SEEDS = 1000
DEFAULT_POLICIES = ("default", "lru", "opt")
DEFAULT_MODEL = "llama-3.1-8b"

_TINY = Trace(
    name="",
    ids=np.zeros(1, np.int32),
    offsets=np.array([0, 1], np.int64),
    times_s=np.zeros(1),
    input_tokens=np.ones(1, np.int64),
    output_tokens=np.ones(1, np.int64),
    chunk_tokens=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a document answers. ValueError or OSError, before any work, for what cannot be done."""

    traces: Sequence[Path]
    model: ModelShape
    device: Device
    sizes: Sizes
    policies: Sequence[str] = DEFAULT_POLICIES
    seeds: int = 1
    budget: Budget = NO_BUDGET

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= MOST_SEEDS:
            raise ValueError(f"--seeds is {self.seeds}, must be from 1 to {MOST_SEEDS}")
        for name in self.policies:
            contender(name)
        for path in self.traces:
            path.stat()
        if len({path.name for path in self.traces}) < len(self.traces):
            raise ValueError("two of the traces have one name: the document could not tell them")


def answer(question: Question, command: Sequence[str], progress: Progress) -> Document:
    """The document. command: what was called, for whoever wants to do it again."""
    parts = [
        _answer_one(question, trace, seed, stretch)
        for trace, seed, stretch in _traces(question, Stretch(progress))
    ]
    Stretch(progress)(1, 1)
    document = _head(question, command) | {
        name: [entry for part in parts for entry in part[name]]
        for name in ("traces", "cells", "curves", "knees")
    }
    return document | {"advice": advise(document)}


def _traces(question: Question, stretch: Stretch) -> Iterator[tuple[Trace, int, Stretch]]:
    """Every trace with every seed that makes a difference to it, and what of the bar is its own."""
    for path, own in zip(question.traces, stretch.split(len(question.traces)), strict=True):
        arrivals_s = None
        for seed, part in enumerate(own.split(question.seeds)):
            reading, replaying = part.split(2)
            trace = load_trace(path, seed=seed, progress=reading)
            if arrivals_s is not None and np.array_equal(trace.times_s, arrivals_s):
                break  # the format says when requests arrive
            arrivals_s = trace.times_s
            yield trace, seed, replaying


def _answer_one(question: Question, trace: Trace, seed: int, stretch: Stretch) -> Document:
    """All of the document that is about one trace with one seed."""
    if not trace.refs:
        raise ValueError(f"{trace.name}: no prompt fills a chunk of {trace.chunk_tokens} tokens")
    model = question.model
    capacities = question.sizes.of(trace, model.chunk_bytes(trace.chunk_tokens))
    curves, named = Curves(trace), {"trace": trace.name, "seed": seed}
    cells = [
        named | cell
        for capacity, part in zip(capacities, stretch.split(len(capacities)), strict=True)
        for cell in _cells(question, trace, capacity, curves, part)
    ]
    return {
        "traces": [] if seed else [_facts(trace, curves)],
        "cells": cells,
        "curves": [named | curve for curve in curves.points()],
        "knees": [named | curves.knee(model)],
    }


def _cells(
    question: Question, trace: Trace, capacity: Capacity, curves: Curves, stretch: Stretch
) -> list[Document]:
    """One for each policy, of one capacity."""
    model, device = question.model, question.device
    task = Task(
        trace=trace,
        dram_chunks=capacity.dram_chunks,
        nvme_chunks=capacity.nvme_chunks,
        writes_per_ref=question.budget.of(trace, model, device),
    )
    parts = zip(question.policies, stretch.split(len(question.policies)), strict=True)
    results = {name: _timed(contender(name), task, part) for name, part in parts}
    bounds = Bounds(
        optimal=curves.optimal(capacity.dram_chunks + capacity.nvme_chunks),
        lru=_lru_hits(capacity, curves, results),
    )
    return [
        {
            "policy": name,
            "dram_share": capacity.dram_share,
            "nvme_share": capacity.nvme_share,
            "seconds": seconds,
        }
        | describe(trace, capacity, counts, bounds, model, device)
        for name, (counts, seconds) in results.items()
    ]


def _lru_hits(
    capacity: Capacity, curves: Curves, results: Mapping[str, tuple[TierCounts, float]]
) -> int | None:
    """Of two tiers only when it was asked for: there is no curve."""
    if not capacity.nvme_chunks:
        return curves.lru(capacity.dram_chunks)
    if "lru" not in results:
        return None
    return int(results["lru"][0].hits.sum(dtype=np.int64))


def _timed(replay: Contender, task: Task, progress: Progress) -> tuple[TierCounts, float]:
    """What it counted and the seconds it took; compiling is not counted."""
    replay(replace(task, trace=_TINY), no_progress)
    began_s = time.perf_counter()
    counts = replay(task, progress)
    seconds = time.perf_counter() - began_s
    progress(1, 1)
    return counts, seconds


def _head(question: Question, command: Sequence[str]) -> Document:
    model, device, sizes = question.model, question.device, question.sizes
    drives = {"drive_tb": device.nvme_tb * device.nvme_drives, "drive_dwpd": device.nvme_dwpd}
    return {
        "rootcellar": __version__,
        "command": shlex.join(command),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {
            "name": model.name,
            "kv_bytes_per_token": model.bytes_per_token,
            "chunk_bytes": model.chunk_bytes(),
            "weights_bytes": model.weight_bytes or None,
        },
        "device": asdict(device) | drives,
        "budget": {"dram_bytes": sizes.fast_bytes or None, "nvme_bytes": sizes.nvme_bytes or None},
    }


def _facts(trace: Trace, curves: Curves) -> Document:
    return {
        "trace": trace.name,
        "requests": trace.num_requests,
        "refs": trace.refs,
        "distinct": trace.distinct,
        "chunk_tokens": trace.chunk_tokens,
        "hours": trace.duration_s / 3600,
        "input_tokens": int(trace.input_tokens.sum()),
        "infinite_hit": curves.infinite / trace.refs,
        "notes": list(trace.notes),
    }
