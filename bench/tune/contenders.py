"""Who takes part in a replay, by name: the policies of a store, and the two bounds they are held
against."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise

import numpy as np

from ...admission.always import Always
from ...admission.base import AdmissionPolicy, Key
from ...admission.choices import POLICIES, make
from ...admission.write_budget import WriteBudget
from .counts import TierCounts, of_one_tier
from .lru import replay_lru
from .optimal import replay_optimal
from .replay import Replay
from .trace import Trace

Progress = Callable[[int, int], None]
"""Told chunk references done and in all."""

_REPORT_REQUESTS = 256
_BURSTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One replay: a trace through tiers of so many chunks; nvme_chunks is 0 without the tier.

    writes_per_ref: the write budget of the default policy, None without one.
    """

    trace: Trace
    dram_chunks: int
    nvme_chunks: int
    writes_per_ref: float | None = None


Contender = Callable[[Task, Progress], TierCounts]


def contender(name: str) -> Contender:
    """ValueError lists the names there are."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if name not in POLICIES:
        known = ", ".join(sorted({*_BUILT_IN, *POLICIES}))
        raise ValueError(f"--policy is {name!r}, must be one of {known}")
    return lambda task, progress: replay_policy(task, make(name), progress)


def replay_policy(task: Task, policy: AdmissionPolicy, progress: Progress) -> TierCounts:
    """Any policy, one request after the other."""
    trace = task.trace
    replay = Replay(policy, task.dram_chunks, task.nvme_chunks)
    hits = np.zeros((2, trace.num_requests), np.int32)
    keys, plain = _keys(trace.distinct), 0
    offsets, times_s = trace.offsets.tolist(), trace.times_s.tolist()
    for request, (start, stop) in enumerate(pairwise(offsets)):
        chain = [keys[chunk] for chunk in trace.ids[start:stop].tolist()]
        found = replay.request(chain, times_s[request])
        hits[:, request] = found.dram, found.nvme
        plain += found.plain
        if request % _REPORT_REQUESTS == 0:
            progress(start, trace.refs)
    return TierCounts(
        dram_hits=hits[0],
        nvme_hits=hits[1],
        plain_hits=plain,
        chunk_writes=replay.chunk_writes,
        nvme_chunk_writes=replay.nvme_chunk_writes,
        promotions=replay.promotions,
        wasted_promotions=replay.wasted_promotions,
        refusals=replay.refusals,
    )


def _lru(task: Task, progress: Progress) -> TierCounts:
    """Everything is admitted, and written down when it would be evicted."""
    if task.nvme_chunks:
        return replay_policy(task, Always(), progress)
    return of_one_tier(replay_lru(task.trace, task.dram_chunks))


def _optimal(task: Task, progress: Progress) -> TierCounts:
    """Of one tier as large as both and as fast as DRAM."""
    counts = replay_optimal(task.trace, task.dram_chunks + task.nvme_chunks)
    return of_one_tier(counts, below_dram=task.nvme_chunks > 0)


def _default(task: Task, progress: Progress) -> TierCounts:
    """With a write budget, the policy's own object; without, the same compiled, which is faster."""
    from ...admission.learned.policy import Learned  # these take a while to load
    from .learned import replay_learned

    if task.writes_per_ref is None:
        return replay_learned(task.trace, task.dram_chunks, task.nvme_chunks, progress)
    return replay_policy(task, Learned(write_budget=_budget(task)), progress)


def _budget(task: Task) -> WriteBudget | None:
    """Of chunk writes over the time of the trace, of which a hundredth may be saved up."""
    if task.writes_per_ref is None:
        return None
    writes = task.writes_per_ref * task.trace.refs
    rate = writes / max(task.trace.duration_s, 1.0)
    return WriteBudget(rate_bytes_s=rate, burst_bytes=writes / _BURSTS)


def _keys(count: int) -> list[Key]:
    """Policies may take bits of a key for a hash."""
    return [sha256(number.to_bytes(8, "little")).digest() for number in range(count)]


_BUILT_IN: dict[str, Contender] = {
    "default": _default,
    "learned": _default,
    "lru": _lru,
    "opt": _optimal,
    "optimal": _optimal,
}
