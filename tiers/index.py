"""The index on disk: what chunk files there are and how they were used, in one LMDB map.

It only saves the time to read every header when a store opens. The files are the truth, so an
index that is lost, stale or cannot be written costs time and the order of eviction, never a chunk.
"""

import gc
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import lmdb

from .chunk_file import file_bytes
from .io.base import ChunkMeta, Codec

_KEY_BYTES = 32
_ROW = struct.Struct("<32sQ32sIQQBQdI")
_USE = struct.Struct("<dI")  # how a row ends
_IDENTITY = struct.Struct("<32sQ")  # how a row begins
_CODEC_AT = struct.calcsize("<32sQ32sIQQ")
_CODECS = frozenset(Codec)
_FIRST_MAP_BYTES = 64 << 20
_TRUSTED = b"trusted"
"""There while every row says the truth about its file: not while a writer is open."""


class Row(NamedTuple):
    """One chunk file, as the index knows it; fields as in ChunkMeta, FileRef and TouchJob."""

    key: bytes
    namespace: bytes
    generation: int
    parent: bytes
    num_tokens: int
    payload_bytes: int
    stored_bytes: int
    codec: int
    file_bytes: int
    last_use_s: float
    hits: int

    @property
    def meta(self) -> ChunkMeta:
        return ChunkMeta(
            self.namespace,
            self.generation,
            self.key,
            self.parent,
            self.num_tokens,
            self.payload_bytes,
            self.stored_bytes,
            Codec(self.codec),
        )


def row_of(meta: ChunkMeta, file_bytes: int, last_use_s: float, hits: int = 0) -> Row:
    return Row(
        meta.key,
        meta.namespace,
        meta.generation,
        meta.parent,
        meta.num_tokens,
        meta.payload_bytes,
        meta.stored_bytes,
        meta.codec,
        file_bytes,
        last_use_s,
        hits,
    )


class Loaded(NamedTuple):
    rows: list[Row]
    trusted: bool
    """Whether the last writer closed it whole, so that no file needs a second look."""


def load(path: Path) -> Loaded:
    """Everything in the index at `path`. Raises lmdb.Error if it is not there or not whole."""
    with paused_gc(), environment(path, readonly=True) as env, env.begin() as txn:
        trusted = txn.get(_TRUSTED) is not None
        return Loaded(list(_rows(txn.cursor())), trusted)


def rewrite(path: Path, rows: Iterable[Row], gone: Iterable[bytes], *, trust: bool = False) -> None:
    """Delete keys and put rows in one commit; no writer may be open. Creates it when absent.

    trust: from now on every row says the truth about its file. Raises lmdb.Error or OSError if
    it cannot be written.
    """
    with environment(path) as env:
        changes: list[Change] = [Delete(key) for key in gone]
        commit(env, [*changes, *map(Put, rows)])
        if trust:
            set_trusted(env, True)


class Put(NamedTuple):
    row: Row

    def apply(self, txn: lmdb.Transaction) -> None:
        txn.put(self.row.key, _ROW.pack(*self.row[1:]))


class Delete(NamedTuple):
    """Without an identity, whatever file the key's row speaks of."""

    key: bytes
    identity: bytes = b""

    def apply(self, txn: lmdb.Transaction) -> None:
        row = txn.get(self.key)
        if row is not None and bytes(row).startswith(self.identity):
            txn.delete(self.key)


class Touch(NamedTuple):
    key: bytes
    last_use_s: float
    hits: int

    def apply(self, txn: lmdb.Transaction) -> None:
        row = txn.get(self.key)
        if row is not None:
            txn.put(self.key, bytes(row)[: -_USE.size] + _USE.pack(self.last_use_s, self.hits))


Change = Put | Delete | Touch


def identity(namespace: bytes, generation: int) -> bytes:
    """For Delete: only if the key's row speaks of a file of this life of the namespace."""
    return _IDENTITY.pack(namespace, generation)


@contextmanager
def environment(path: Path, *, readonly: bool = False) -> Iterator[lmdb.Environment]:
    """The LMDB map at `path`, made when absent unless readonly; at most one per process."""
    if not readonly:
        path.mkdir(mode=0o700, exist_ok=True)
    data = path / "data.mdb"
    held_bytes = data.stat().st_size if data.exists() else 0
    env = lmdb.open(
        str(path),
        map_size=max(_FIRST_MAP_BYTES, 2 * held_bytes),
        metasync=False,
        readonly=readonly,
        create=False,
        mode=0o600,
    )
    try:
        _check_length(env, data)
        yield env
    finally:
        env.close()


def commit(env: lmdb.Environment, changes: Iterable[Change]) -> None:
    """All of them or, with lmdb.Error, none."""
    batch = list(changes)
    while True:
        try:
            with env.begin(write=True) as txn:
                for change in batch:
                    change.apply(txn)
            return
        except lmdb.MapFullError:
            env.set_mapsize(2 * env.info()["map_size"])


def set_trusted(env: lmdb.Environment, trusted: bool) -> bool:
    """Returns what it was. On disk for good before this returns."""
    with env.begin(write=True) as txn:
        was = txn.get(_TRUSTED) is not None
        if trusted:
            txn.put(_TRUSTED, b"")
        elif was:
            txn.delete(_TRUSTED)
    env.sync(True)
    return was


def _rows(cursor: lmdb.Cursor) -> Iterator[Row]:
    for key, value in cursor:
        if key == _TRUSTED:
            continue
        if len(key) != _KEY_BYTES or len(value) != _ROW.size or value[_CODEC_AT] not in _CODECS:
            raise lmdb.CorruptedError(f"{value!r} under {key!r} is no row")
        row = Row._make((key, *_ROW.unpack(value)))
        if not _plausible(row):
            raise lmdb.CorruptedError(f"{row!r} speaks of no chunk file")
        yield row


def _plausible(row: Row) -> bool:
    """LMDB has no checksums: a row that makes no sense means that others may lie as well."""
    raw = row.codec == Codec.RAW
    return (
        0 < row.num_tokens < 1 << 31
        and 0 < row.stored_bytes <= row.payload_bytes < 1 << 48
        and (row.stored_bytes == row.payload_bytes or not raw)
        and row.file_bytes == file_bytes(row.stored_bytes, Codec(row.codec))
    )


def _check_length(env: lmdb.Environment, data: Path) -> None:
    """LMDB would touch memory beyond the end of a file that was cut, and the process would die."""
    need_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    held_bytes = data.stat().st_size
    if env.info()["last_txnid"] and held_bytes < need_bytes:
        raise lmdb.CorruptedError(f"{data} has {held_bytes} bytes of {need_bytes}")


@contextmanager
def paused_gc() -> Iterator[None]:
    """A million new tuples would make the cyclic collector walk them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
