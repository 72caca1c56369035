"""Keys to rows of the arrays, which grow with need and hand out again what was given up."""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from ..base import Key, Tier
from .hazard import class_of, use_class
from .records import NONE, Place, Rows, grow_model, grow_place, new_model, new_place

_AT_FIRST = 4096
_UNKNOWN_CLASS = (False, 2, 1, 7, 100.0)
"""What class_of() takes a chunk for that is here, but whose requests nobody told of."""


class RowBook:
    """Owns the arrays: `model` and `places` are replaced when they grow, so nobody keeps them."""

    def __init__(self, capacity: Mapping[Tier, int], most_ghosts: int) -> None:
        self.model = new_model(_AT_FIRST, most_ghosts)
        self.places: dict[Tier, Place] = {
            tier: new_place(_AT_FIRST, chunks) for tier, chunks in capacity.items()
        }
        self._rows: dict[Key, int] = {}
        self._keys: list[Key | None] = []
        self._free: list[int] = []

    def key(self, row: int) -> Key:
        key = self._keys[row]
        assert key is not None, "the row belongs to nobody"
        return key

    def find(self, keys: Iterable[Key]) -> Rows:
        """Their rows; NONE for keys that nobody knows."""
        get = self._rows.get
        return np.array([get(key, NONE) for key in keys], np.int32)

    def give(self, keys: Iterable[Key]) -> Rows:
        """Their rows, new ones where there are none."""
        self.take_back()
        get = self._rows.get
        wanted = list(keys)
        rows = [get(key, NONE) for key in wanted]
        for at, row in enumerate(rows):
            if row == NONE:
                rows[at] = self._new(wanted[at])
        return np.array(rows, np.int32)

    def row(self, key: Key) -> int:
        """Of a key that has one."""
        return self._rows[key]

    def meet(self, keys: list[Key], parents: list[Key | None]) -> tuple[Rows, Rows]:
        """The rows of chunks that come into a tier, and of what each hangs from there."""
        rows = self.give(keys)
        above = np.full(len(keys), NONE, np.int32)
        hung = [at for at, parent in enumerate(parents) if parent is not None]
        above[hung] = self.give(filter(None, parents))
        for at in np.flatnonzero(~self._tracked(rows)).tolist():
            self._meet_stranger(int(rows[at]), int(above[at]))
        return rows, above

    def _tracked(self, rows: Rows) -> npt.NDArray[np.bool_]:
        tracked: npt.NDArray[np.bool_] = self.model.chunks["tracked"][rows] > 0
        return tracked

    def _meet_stranger(self, row: int, above: int) -> None:
        """Of a chunk that no request named it is not known what it is worth: what hangs beside a
        chain goes by its parent, what a restart found by itself."""
        now, chunk = self.model.now[0], self.model.chunks[row]
        if chunk["places"]:
            return
        klass = class_of(*_UNKNOWN_CLASS)
        use_class(self.model, klass)
        found = now["requests"] == 0
        chunk["parent"], chunk["klass"], chunk["last"] = above, klass, now["clock"]
        chunk["follows"] = above != NONE and not found
        chunk["tracked"], chunk["touches"], chunk["turn"] = found, 1, 1

    def take_back(self) -> None:
        """Rows of forgotten chunks can be given to others, save those that something hangs from."""
        now = self.model.now[0]
        for row in self.model.forgotten[: now["forgotten"]].tolist():
            self.release(row)
        now["forgotten"] = 0

    def release(self, row: int) -> None:
        """Give a row up if nobody needs it: not tracked, in no tier, and nothing hangs from it."""
        chunk = self.model.chunks[row]
        key = self._keys[row]
        hung = any(place.chunks["kids"][row] for place in self.places.values())
        if key is None or chunk["tracked"] or chunk["places"] or hung:
            return
        del self._rows[key]
        self._keys[row] = None
        self._free.append(row)
        chunk["follows"], chunk["parent"] = 0, NONE

    def __len__(self) -> int:
        return len(self._rows)

    def check_integrity(self) -> None:
        known = {row for row, key in enumerate(self._keys) if key is not None}
        assert {self._rows[key] for key in self._rows} == known
        assert known.isdisjoint(self._free)
        assert len(known) + len(self._free) == len(self._keys)
        for row in known:
            places = sum(int(place.chunks["here"][row]) for place in self.places.values())
            assert places == self.model.chunks["places"][row]
            if self.model.chunks["ghost"][row]:
                assert not places
                assert self.model.chunks["tracked"][row]

    def _new(self, key: Key) -> int:
        if self._free:
            row = self._free.pop()
            self._keys[row] = key
        else:
            row = len(self._keys)
            self._keys.append(key)
            if row >= len(self.model.chunks):
                self._grow(2 * row)
        self._rows[key] = row
        return row

    def _grow(self, num_chunks: int) -> None:
        self.model = grow_model(self.model, num_chunks)
        for tier, place in self.places.items():
            self.places[tier] = grow_place(place, num_chunks)
