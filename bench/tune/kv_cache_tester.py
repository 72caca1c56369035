"""Sessions of coding agents (callanjfox/kv-cache-tester): a session a line, or a file."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ...admission.jit import jit
from .building import BlockRequests
from .fields import Record, ids, number, whole
from .trace import Trace

SPREAD_S = 8 * 3600.0
"""Sessions do not say when they began."""


class KvCacheTester:
    """Records of block_size, hash_id_scope and requests.

    A request has t (s from the session's start), in, out, and its prompt's full blocks as hash_ids
    or, run-length coded, as hash_runs [id, length, id, length, ...]. A sub-agent stands among the
    requests as an entry with requests of its own, whose t count from its t and whose ids are the
    session's; it is no request itself. Ids hold in their session, or everywhere where
    hash_id_scope is "global".
    """

    def __init__(self, first: Record, seed: int) -> None:
        self._block = whole(first, "block_size")
        if not self._block:
            raise ValueError("block_size is 0, must be at least 1")
        self._requests = BlockRequests(self._block)
        self._rng = np.random.default_rng(seed)
        self._seed = seed
        self._sessions = 0
        self._global: bool | None = None

    @staticmethod
    def reads(record: Record) -> bool:
        return "block_size" in record and "requests" in record

    def add(self, record: Record) -> None:
        if record.get("block_size") != self._block:
            raise ValueError(
                f"block_size is {record.get('block_size')!r}, was {self._block} before"
            )
        start_s = self._rng.uniform(0, SPREAD_S)
        self._sessions += 1
        self._enter_scope(record)
        for time_s, request in _flat(record, start_s):
            blocks = _expanded(request) if "hash_runs" in request else ids(request, "hash_ids")
            self._requests.add(time_s, whole(request, "in"), whole(request, "out"), blocks)

    def trace(self, name: str) -> Trace:
        note = (
            f"The {self._sessions} sessions do not say when they began: their starts are drawn"
            f" uniformly from {SPREAD_S / 3600:.0f} hours with seed {self._seed}. Inside a session"
            " times are as recorded; a sub-agent's count from its own start."
        )
        return self._requests.trace(name, (note,))

    def _enter_scope(self, record: Record) -> None:
        scope = record.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise ValueError(f'hash_id_scope is {scope!r}, must be "local" or "global"')
        if self._global not in (None, scope == "global"):
            raise ValueError("hash_id_scope is not that of the sessions before")
        self._global = scope == "global"
        if not self._global:
            self._requests.new_scope()


def _flat(entry: Record, start_s: float) -> Iterator[tuple[float, Record]]:
    """Every request of a session or a sub-agent, with its time."""
    requests = entry["requests"]
    if not isinstance(requests, list):
        raise ValueError("requests is no list")
    for request in requests:
        if not isinstance(request, dict):
            raise ValueError("a request is no JSON object")
        time_s = start_s + number(request, "t")
        if "requests" in request:
            yield from _flat(request, time_s)
        else:
            yield time_s, request


def _expanded(request: Record) -> array[int]:
    runs = np.array(ids(request, "hash_runs"))
    total = sum(runs[1::2].tolist())
    if len(runs) % 2 or total > whole(request, "in"):
        raise ValueError("hash_runs are no pairs of id and length that fit into the prompt")
    out = np.empty(total, np.uint64)
    _expand(runs, out)
    blocks = array("Q")
    blocks.frombytes(out.view(np.uint8).data)
    return blocks


@jit
def _expand(runs: NDArray[np.uint64], out: NDArray[np.uint64]) -> None:
    at = 0
    for run in range(0, len(runs), 2):
        for step in range(runs[run + 1]):
            out[at], at = runs[run] + np.uint64(step), at + 1
