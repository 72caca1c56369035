"""Which weights a model has: a hub commit, or a digest of the files they were read from.

The name of a model says nothing: branches move, and a directory's files are trained on, merged
and quantized in place. A local model is therefore read, all of it, once; what was read is
remembered by what the file system says of each file, so that a restart reads nothing.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import xxhash

logger = logging.getLogger(__name__)

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_NOT_WEIGHTS = frozenset(
    {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
)
"""What trainers leave beside the weights; vLLM passes over these too."""

_OTHER_FOLDERS = re.compile(r"\..*|__pycache__|original|checkpoint-\d+")
"""Caches, a second copy in the format of the model's maker, and what training saved on its way:
vLLM reads none of them for a model in the directory above."""

_SETTINGS = frozenset(
    {
        "generation_config.json",
        "hf_quant_config.json",
        "params.json",
        "preprocessor_config.json",
        "processor_config.json",
        "quant_config.json",
        "quantize_config.json",
        "video_preprocessor_config.json",
    }
)
"""Files that say how weights or inputs are read. config.json is not among them: the engine's
configuration has all of it, with what the user overrode."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_READ_BYTES = 8 << 20
_THREADS = 4
_REMEMBERED = 4096
"""Files, the last ones asked for; a large model has a few hundred."""


def weights_revision(
    model: str, revision: str | None, hf_config_commit: str | None, cache: Path | None
) -> str:
    """The hub commit a model was resolved to, or a digest of its local files.

    model: a directory, a file, or a name on the hub. revision: as the user gave it; counts only
    where it is itself a commit. hf_config_commit: what the model's configuration was resolved to
    on the hub. cache: JSON file that remembers digests, made when absent; None remembers nothing.
    ValueError where neither is to be had, OSError where a file cannot be read.
    """
    path = Path(model)
    if path.is_dir():
        commit = _snapshot_commit(path)
        return f"commit {commit}" if commit else _directory_revision(path, cache)
    if path.is_file():
        return f"files {_combined({path.name: path}, cache)}"
    commit = hf_config_commit or revision
    if commit is None or not _COMMIT.fullmatch(commit):
        raise ValueError(
            f"the weights of {model!r} have neither a local directory nor a hub commit: set "
            "weights_id in kv_connector_extra_config to a name that changes when they do"
        )
    return f"commit {commit}"


def _snapshot_commit(path: Path) -> str | None:
    """Of `.../models--org--name/snapshots/<commit>`, as long as its files are the hub cache's own.

    The hub cache links each file of a snapshot to a blob named by its content; a file that was
    put there by hand is not such a link.
    """
    path = Path(os.path.abspath(path))
    in_hub_cache = path.parent.name == "snapshots" and path.parents[1].name.startswith("models--")
    if not in_hub_cache or not _COMMIT.fullmatch(path.name):
        return None
    blobs = path.parents[1] / "blobs"
    files = _files(path).values()
    ours = all(file.is_symlink() and file.resolve().parent == blobs.resolve() for file in files)
    return path.name if files and ours else None


def _directory_revision(path: Path, cache: Path | None) -> str:
    files = _files(path)
    if not any(file.suffix in _WEIGHTS for file in files.values()):
        raise ValueError(
            f"the directory {str(path)!r} has no weight files ({', '.join(sorted(_WEIGHTS))}): set "
            "weights_id in kv_connector_extra_config to a name that changes when the weights do"
        )
    return f"files {_combined(files, cache)}"


def _files(root: Path) -> dict[str, Path]:
    """By path below the model's directory, those that decide what is computed.

    Folders too: some models keep a vision tower or an encoder in one.
    """
    files: dict[str, Path] = {}
    visited: set[str] = set()
    for folder, below, names in os.walk(root, followlinks=True):
        visited.add(os.path.realpath(folder))
        below[:] = [
            name
            for name in below
            if not _OTHER_FOLDERS.fullmatch(name)
            # A link upwards would go round for ever.
            and os.path.realpath(os.path.join(folder, name)) not in visited
        ]
        paths = [Path(folder, name) for name in names if _decides(name)]
        files |= {path.relative_to(root).as_posix(): path for path in paths}
    return files


def _decides(name: str) -> bool:
    suffix = os.path.splitext(name)[1]
    if suffix in _WEIGHTS:
        return name not in _NOT_WEIGHTS
    # Code in the directory is the model's, where it is trusted.
    return suffix == ".py" or name in _SETTINGS or name.endswith(".index.json")


def _combined(files: dict[str, Path], cache: Path | None) -> str:
    """SHA-256 over name, size and content digest of every file, in the order of their names."""
    memory = _Memory(cache)
    digests = memory.digests(files.values())
    combined = hashlib.sha256()
    for name in sorted(files):
        size, digest = digests[files[name]]
        line = json.dumps([name, size, digest])
        combined.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return combined.hexdigest()


class _Memory:
    """Content digests by path, taken for true only while a file looks untouched."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known = {} if path is None else _load(path)

    def digests(self, files: Iterable[Path]) -> dict[Path, tuple[int, str]]:
        """Size and digest of each; reads those not known, and remembers them for next time."""
        real = {file: os.path.realpath(file) for file in files}
        unread = sorted({path for path in real.values() if self._lookup(path) is None})
        if unread:
            self._read(unread)
        known = {path: self._known.pop(path) for path in dict.fromkeys(real.values())}
        self._known |= known
        if unread and self._path is not None:
            _save(self._path, dict(list(self._known.items())[-_REMEMBERED:]))
        return {file: (_size(known[path]), known[path][-1]) for file, path in real.items()}

    def _lookup(self, path: str) -> str | None:
        entry = self._known.get(path)
        return entry[-1] if entry is not None and entry[:-1] == _looks(path) else None

    def _read(self, paths: list[str]) -> None:
        began_s = time.monotonic()
        # Hashing and reading both let go of the interpreter lock.
        with ThreadPoolExecutor(_THREADS) as threads:
            self._known.update(zip(paths, threads.map(_entry, paths), strict=True))
        size = sum(_size(self._known[path]) for path in paths)
        logger.info(
            "Read %.2f GiB of weights in %d files in %.1f s to tell them from others",
            size / (1 << 30),
            len(paths),
            time.monotonic() - began_s,
        )


_Entry = tuple[str, ...]
"""size, mtime_ns, ctime_ns and inode, in decimal, and the content's digest. Decimal, so that JSON
keeps them exact; ctime, because unlike mtime it cannot be set back."""


def _size(entry: _Entry) -> int:
    return int(entry[0])


def _looks(path: str) -> _Entry:
    stat = os.stat(path)
    return tuple(map(str, (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)))


def _entry(path: str) -> _Entry:
    """Looks are taken before the content: a write in between is seen next time."""
    looks = _looks(path)
    digest = xxhash.xxh3_128()
    buffer = bytearray(_READ_BYTES)
    with open(path, "rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(memoryview(buffer)[:num_bytes])
    return (*looks, digest.hexdigest())


def _load(path: Path) -> dict[str, _Entry]:
    """What was remembered; nothing if the file is not exactly as _save writes it."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and all(map(_is_entry, found.values())):
            return {name: tuple(entry) for name, entry in found.items()}
    return {}


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 5
        and all(isinstance(part, str) for part in entry)
        and entry[0].isdecimal()
        and re.fullmatch(r"[0-9a-f]{32}", entry[4]) is not None
    )


def _save(path: Path, entries: dict[str, _Entry]) -> None:
    """Only a saving of time: a directory that cannot be written is read again, not an error."""
    with suppress(OSError):
        # Without parents: those are missing where a drive is not mounted.
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # mkstemp gives mode 0600 and a name of its own, so replicas may write at once.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(entries, file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
