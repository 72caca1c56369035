"""How often keys were seen, in memory that does not grow with their number.

A count-min sketch (Cormode and Muthukrishnan, Journal of Algorithms 2005) with conservative update
(Estan and Varghese, SIGCOMM 2002): only the counters that hold a key's estimate are raised. Counts
are halved now and then (TinyLFU, Einziger, Friedman and Manes, ACM ToS 2017). TinyLFU halves after
a number of requests; here it is after a number of keys, because a growing session sends the same
long prefix again and again, which says nothing about how full the sketch is.
"""

import hashlib
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .base import Key

MOST = 255
_ROWS = 4
_CELLS_PER_KEY = 4  # at most a quarter of a row is in use: 0.4 % of unseen keys look seen
_KEY_BYTES = 32
_KEYS_IN = struct.Struct("<Q")

Counts = npt.NDArray[np.uint8]
Cells = npt.NDArray[np.int64]


class CountMinSketch:
    """Remembers between half of `entries` keys and all of them, and those of one add() more; takes
    16 to 32 bytes for each.

    Between halvings no key is counted too low, save that counts stop at `most`, and few too high.
    The default lets a key that was ever hot be forgotten after four halvings.
    """

    def __init__(self, entries: int, *, most: int = 15) -> None:
        if entries < 1:
            raise ValueError(f"entries is {entries}, must be at least 1")
        if not 1 <= most <= MOST:
            raise ValueError(f"most is {most}, must be from 1 to {MOST}")
        self.halvings = 0
        self._entries = entries
        self._most = most
        self._bits = max(10, (_CELLS_PER_KEY * entries - 1).bit_length())
        self._table: Counts = np.zeros(_ROWS << self._bits, np.uint8)  # the rows, end to end
        self._keys_in = 0  # keys that had a count of 0 before, since the sketch had room

    def add(self, keys: Sequence[Key]) -> None:
        """Each of these, all different, was seen once more."""
        if not keys:
            return
        if self._keys_in >= self._entries:
            self._halve()  # before, not after: these are to be found with what they have now
        cells = self._cells(keys)
        counts = self._table[cells].min(axis=1)
        raised = np.minimum(counts, self._most - 1) + np.uint8(1)
        np.maximum.at(self._table, cells, raised[:, None])
        self._keys_in += int(np.count_nonzero(counts == 0))

    def counts(self, keys: Sequence[Key]) -> Counts:
        """How often each was seen, as far as is remembered; uint8 of shape (len(keys),)."""
        if not keys:
            return np.zeros(0, np.uint8)
        counts: Counts = self._table[self._cells(keys)].min(axis=1)
        return counts

    def save(self) -> bytes:
        return _KEYS_IN.pack(self._keys_in) + zlib.compress(self._table.tobytes(), 1)

    def restore(self, data: bytes) -> bool:
        """Go on from what save() gave; False, and nothing changed, when it was of another size."""
        unpacker = zlib.decompressobj()
        try:
            raw = unpacker.decompress(data[_KEYS_IN.size :], len(self._table) + 1)
        except zlib.error:
            return False
        table: Counts = np.frombuffer(raw, np.uint8).copy()
        if len(table) != len(self._table) or not unpacker.eof or table.max() > self._most:
            return False
        (keys_in,) = _KEYS_IN.unpack_from(data)
        self._table, self._keys_in = table, keys_in
        return True

    def _halve(self) -> None:
        """Until there is room for as many keys again, so that its cost is spread over them."""
        while self._keys_in > self._entries // 2:
            self._table >>= 1
            self.halvings += 1
            self._keys_in = self._in_use()

    def _in_use(self) -> int:
        return int(np.count_nonzero(self._table[: 1 << self._bits]))

    def _cells(self, keys: Sequence[Key]) -> Cells:
        """Where the counters of each key stand, of shape (len(keys), rows)."""
        hashes = _words(keys) @ _MULTIPLIERS  # modulo 2**64
        within = (hashes >> np.uint64(64 - self._bits)).astype(np.int64)
        return within + (np.arange(_ROWS, dtype=np.int64) << self._bits)


_MULTIPLIERS = np.frombuffer(
    hashlib.shake_128(b"rootcellar count-min").digest(8 * (_KEY_BYTES // 8) * _ROWS), "<u8"
).reshape(_KEY_BYTES // 8, _ROWS) | np.uint64(1)
"""Multiply-add hashing of the words of a key (Dietzfelbinger et al. 1997), a column per row."""


def _words(keys: Sequence[Key]) -> npt.NDArray[np.uint64]:
    """Keys are hashes of 32 bytes already: taken as they are. Others are hashed to that."""
    if set(map(len, keys)) != {_KEY_BYTES}:
        keys = [hashlib.blake2b(key, digest_size=_KEY_BYTES).digest() for key in keys]
    return np.frombuffer(b"".join(keys), "<u8").reshape(len(keys), _KEY_BYTES // 8)
