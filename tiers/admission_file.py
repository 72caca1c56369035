"""What admission learned, kept in the store's directory so that a restart does not forget it.

    root/admission.bin = magic, format version, bytes of the name, bytes of the data, checksum
                         | name of the policy | data, the policy's own business

The checksum is xxh3-128 of name and data. Whatever is not whole, or another policy's, is as good as
absent, and replaced.
"""

import logging
import os
import struct
import threading
from pathlib import Path
from queue import SimpleQueue

import xxhash

from .chunk_file import ADMISSION, TMP

MAX_BYTES = 256 << 20
_MAGIC = b"rootlern"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ16s")
_log = logging.getLogger(__name__)


class AdmissionFile:
    """Of one policy, known by `name`. Written by a thread of its own; the directory is locked."""

    def __init__(self, root: Path, name: str) -> None:
        self._path = root / ADMISSION
        self._new = root / TMP / ADMISSION  # swept at the next opening, should this process die
        self._name = name.encode()
        self._given: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def read(self) -> bytes:
        """Empty when there is nothing of use."""
        try:
            size_bytes = self._path.stat().st_size
            content = self._path.read_bytes() if size_bytes <= MAX_BYTES else b""
        except FileNotFoundError:
            return b""
        except OSError as error:
            _log.warning("%s cannot be read, admission learns anew: %s", self._path, error)
            return b""
        data = _unpack(content, self._name)
        if data is None:
            _log.warning(
                "%s is damaged or another policy's, admission learns anew and replaces it",
                self._path,
            )
        return data or b""

    def write_soon(self, data: bytes) -> None:
        """Returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="rootcellar-admission", daemon=True
            )
            self._thread.start()
        self._given.put(data)

    def close(self) -> None:
        """Wait until the last that was given is written."""
        if self._thread is not None:
            self._given.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (data := self._given.get()) is not None:
            self._write(data)

    def _write(self, data: bytes) -> None:
        try:
            fd = os.open(self._new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(fd, "wb") as file:
                file.write(_pack(self._name, data))
                file.flush()
                os.fsync(file.fileno())
            self._new.rename(self._path)
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._path, error)


def _pack(name: bytes, data: bytes) -> bytes:
    digest = xxhash.xxh3_128_digest(name + data)
    return _HEADER.pack(_MAGIC, _VERSION, len(name), len(data), digest) + name + data


def _unpack(content: bytes, name: bytes) -> bytes | None:
    """The data of the policy of that name; None when it is not whole or another's."""
    if len(content) < _HEADER.size:
        return None
    magic, version, name_bytes, data_bytes, digest = _HEADER.unpack_from(content)
    rest = content[_HEADER.size :]
    whole = (
        (magic, version) == (_MAGIC, _VERSION)
        and len(rest) == name_bytes + data_bytes
        and xxhash.xxh3_128_digest(rest) == digest
    )
    return rest[name_bytes:] if whole and rest[:name_bytes] == name else None
