"""The format on disk: where a chunk file lies, what its header says, how many bytes it takes.

    root/FORMAT, lock, index.lmdb/
    root/chunks/<namespace>-<generation>/<first two digits of key>/<key>.kv
    root/tmp/        files being written; swept when a store opens
    root/dropped/    namespace folders out of reach, being deleted
    root/weights.json   digests of weight files that an engine's connector remembers
    root/admission.bin  what admission learned

    file = header (4 KiB) | stored bytes | zeros up to the file's size
    header = fields | xxh3-128 of the stored bytes | zeros | xxh3-128 of all of that

All numbers are little-endian, all names lower-case hexadecimal.
"""

import mmap
import os
import re
import struct
import uuid
from pathlib import Path
from typing import Protocol

import xxhash

from .io.base import ChunkMeta, Codec

FORMAT_VERSION = 1
MAGIC = b"rootcell"
HEADER_BYTES = 4096
TRANSIENT = 1 << 63
"""Generations from here on are of KV that no later opening may serve."""

ALIGN_BYTES = 4096
"""O_DIRECT wants offsets, lengths and addresses in multiples of it."""

WEIGHTS = "weights.json"
ADMISSION = "admission.bin"
CHUNKS, TMP, DROPPED, INDEX, LOCK, FORMAT = (
    "chunks",
    "tmp",
    "dropped",
    "index.lmdb",
    "lock",
    "FORMAT",
)
SUFFIX = ".kv"

_FIELDS = struct.Struct("<8sI32sQ32s32sIQQB3x")
_DIGEST_BYTES = 16
_DIGEST_END = _FIELDS.size + _DIGEST_BYTES
_CHECKED_BYTES = HEADER_BYTES - _DIGEST_BYTES
_FOLDER = re.compile(r"([0-9a-f]{64})-([0-9a-f]{16})")
_NAME = re.compile(rf"([0-9a-f]{{64}}){re.escape(SUFFIX)}")
_CLASS_BITS = 4  # leading bits in which sizes of compressed files differ: 8 sizes per doubling


class Named(Protocol):
    """Whatever knows which chunk file it speaks of: a ChunkMeta, a FileRef, a row of the index."""

    @property
    def namespace(self) -> bytes: ...
    @property
    def generation(self) -> int: ...
    @property
    def key(self) -> bytes: ...


def folder_name(namespace: bytes, generation: int) -> str:
    return f"{namespace.hex()}-{generation:016x}"


def parse_folder(name: str) -> tuple[bytes, int] | None:
    """(namespace, generation) of a folder's name; None if it is not one of ours."""
    match = _FOLDER.fullmatch(name)
    return (bytes.fromhex(match[1]), int(match[2], 16)) if match else None


def parse_name(name: str) -> bytes | None:
    """The key in a chunk file's name; None if it is not one of ours."""
    match = _NAME.fullmatch(name)
    return bytes.fromhex(match[1]) if match else None


def chunk_path(root: str, file: Named) -> str:
    name = file.key.hex()
    folder = folder_name(file.namespace, file.generation)
    return f"{root}/{CHUNKS}/{folder}/{name[:2]}/{name}{SUFFIX}"


def padded_bytes(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def file_bytes(stored_bytes: int, codec: Codec) -> int:
    """What a chunk file takes on disk. Compressed ones come in few sizes, at most an eighth apart,
    so that a victim of equal size to recycle is found."""
    size_bytes = padded_bytes(stored_bytes)
    if codec is not Codec.RAW:
        units = size_bytes // ALIGN_BYTES
        step = 1 << max(0, units.bit_length() - _CLASS_BITS)
        size_bytes = -(-units // step) * step * ALIGN_BYTES
    return HEADER_BYTES + size_bytes


def pack_header(meta: ChunkMeta, digest: bytes) -> bytes:
    """digest: xxh3-128 of the stored bytes."""
    checked = (_pack_fields(meta) + digest).ljust(_CHECKED_BYTES, b"\0")
    return checked + xxhash.xxh3_128_digest(checked)


def parse_header(header: bytes | memoryview) -> tuple[ChunkMeta, bytes] | None:
    """What it says, and the digest of the stored bytes; None unless it is whole and ours."""
    if not _is_whole(header):
        return None
    fields = _FIELDS.unpack_from(header)
    magic, version, namespace, generation, key, parent, tokens, payload, stored, codec = fields
    if magic != MAGIC or version != FORMAT_VERSION or codec not in iter(Codec):
        return None
    meta = ChunkMeta(namespace, generation, key, parent, tokens, payload, stored, Codec(codec))
    return meta, bytes(header[_FIELDS.size : _DIGEST_END])


def matching_digest(header: bytes | memoryview, meta: ChunkMeta) -> bytes | None:
    """The digest of the stored bytes if the header is whole and says exactly `meta`, else None."""
    if header[: _FIELDS.size] != _pack_fields(meta) or not _is_whole(header):
        return None
    return bytes(header[_FIELDS.size : _DIGEST_END])


def supports_o_direct(folder: Path) -> bool:
    """Whether files here can really be written and read around the page cache."""
    temporaries = folder / TMP  # swept, should this process die on the way
    path = (temporaries if temporaries.is_dir() else folder) / f"probe-{uuid.uuid4().hex}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError:
        path.unlink(missing_ok=True)
        return False
    try:
        with mmap.mmap(-1, ALIGN_BYTES) as aligned:
            return os.pwrite(fd, aligned, 0) == os.preadv(fd, [aligned], 0) == ALIGN_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _pack_fields(meta: ChunkMeta) -> bytes:
    return _FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        meta.namespace,
        meta.generation,
        meta.key,
        meta.parent,
        meta.num_tokens,
        meta.payload_bytes,
        meta.stored_bytes,
        meta.codec,
    )


def _is_whole(header: bytes | memoryview) -> bool:
    if len(header) != HEADER_BYTES:
        return False
    return xxhash.xxh3_128_digest(header[:_CHECKED_BYTES]) == header[_CHECKED_BYTES:]
