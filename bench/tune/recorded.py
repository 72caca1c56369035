"""What a store recorded of its own traffic; `rootcellar.tiers.trace_file` has the format."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ...admission.jit import jit
from ...tiers.trace_file import FORMAT, VERSION
from .building import Requests
from .fields import Record, number, whole
from .pair_table import Columns, PairTable, find
from .trace import Trace


class Recorded:
    """Chunks are the store's. Those of different runs of it are different, whatever they hold:
    every run hashes them in its own way."""

    def __init__(self, first: Record, seed: int) -> None:
        self._runs: dict[str, int] = {}
        self._begin_s: float | None = None
        self._name, self._run = "", 0
        self._offset_s = self._last_s = 0.0
        self._left_out = 0
        self._torn = False
        self._start(whole(first, "chunk_tokens"))

    @staticmethod
    def reads(record: Record) -> bool:
        return record.get("format") == FORMAT

    def add(self, record: Record) -> None:
        if "format" in record:
            self._enter_run(record)
        else:
            self._request(record)

    def skip_torn(self) -> None:
        """The file ends within a line, as it may while it is written and after a crash."""
        self._torn = True

    def trace(self, name: str) -> Trace:
        self._link()
        return self._requests.trace(name, self._chunk_tokens, tuple(self._notes()))

    def _start(self, chunk_tokens: int) -> None:
        if not chunk_tokens:
            raise ValueError("chunk_tokens is 0, must be at least 1")
        self._chunk_tokens = chunk_tokens
        self._requests = Requests()
        self._table = PairTable()
        self._clear()

    def _clear(self) -> None:
        """Requests since the last header, to be linked."""
        self._like, self._shared, self._new = array("q"), array("q"), array("q")
        self._hashes = bytearray()

    def _enter_run(self, record: Record) -> None:
        if record["format"] != FORMAT or whole(record, "version") > VERSION:
            raise ValueError("it was recorded by a newer rootcellar, which can read it")
        chunk_tokens, start_s = whole(record, "chunk_tokens"), number(record, "start_s")
        self._link()
        if chunk_tokens != self._chunk_tokens:
            self._left_out += len(self._requests)
            self._start(chunk_tokens)
        if self._begin_s is None:
            self._begin_s = start_s
        if str(record["run"]) != self._name:
            # Not before the end of the run before it, whatever became of the clock in between.
            self._offset_s = max(start_s - self._begin_s, self._last_s)
        self._name = str(record["run"])
        self._run = self._runs.setdefault(self._name, len(self._runs))

    def _request(self, record: Record) -> None:
        shared = whole(record, "shared") if "shared" in record else 0
        like = whole(record, "like", len(self._like) - 1) if shared else 0
        if shared and shared > self._shared[like] + self._new[like]:
            raise ValueError(f"shared is {shared}, more than request {like} has")
        hashes = bytes.fromhex(record["new"])
        if len(hashes) % 8:
            raise ValueError("new is not 16 hex digits for each chunk")
        new = len(hashes) // 8
        self._last_s = self._offset_s + number(record, "t")
        self._requests.add(self._last_s, whole(record, "n"), 0, shared + new)
        self._like.append(like)
        self._shared.append(shared)
        self._new.append(new)
        self._hashes += hashes

    def _link(self) -> None:
        """Number the chunks since the last header."""
        like, shared, new = (
            np.array(column, np.int64) for column in (self._like, self._shared, self._new)
        )
        hashes = np.frombuffer(self._hashes, ">u8").astype(np.uint64)
        ids = np.empty(int((shared + new).sum()), np.int32)
        self._table.reserve(len(hashes))
        columns, size = self._table.columns, self._table.size
        self._table.size = _number(like, shared, new, hashes, -1 - self._run, columns, size, ids)
        self._requests.add_ids(ids)
        self._clear()

    def _notes(self) -> Iterator[str]:
        yield (
            f"Chunks are the store's, of {self._chunk_tokens} tokens. How much was generated is not"
            " recorded; it shows where a later prompt repeats it."
        )
        if len(self._runs) > 1:
            yield (
                f"It holds {len(self._runs)} runs of a store. What one of them has in common with"
                " another cannot be seen: each hashes chunks in its own way."
            )
        if self._left_out:
            yield (
                f"{self._left_out} earlier requests are left out: they were recorded with chunks of"
                " another size."
            )
        if self._torn:
            yield "It ends within a line, which is left out."


@jit
def _number(
    like: NDArray[np.int64],
    shared: NDArray[np.int64],
    new: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    root: int,
    columns: Columns,
    known: int,
    ids: NDArray[np.int32],
) -> int:
    """Fill `ids`; a chunk is known by the number of the one before it and its hash. Returns how
    many are known then."""
    starts = np.empty(len(like), np.int64)
    at, taken = 0, 0
    for r in range(len(like)):
        starts[r] = at
        for i in range(starts[like[r]], starts[like[r]] + shared[r]):
            ids[at], at = ids[i], at + 1
        before = int(ids[at - 1]) + 1 if shared[r] else root
        for i in range(taken, taken + new[r]):
            slot = find(columns, before, hashes[i])
            if columns[2][slot] == 0:
                known += 1
                columns[0][slot], columns[1][slot], columns[2][slot] = before, hashes[i], known
            before = int(columns[2][slot])
            ids[at], at = before - 1, at + 1
        taken += new[r]
    return known
