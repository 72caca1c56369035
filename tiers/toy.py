"""Toy chains for tests: a path of small numbers is a chain, equal leading numbers are a shared
prefix, and the content of every chunk follows from its path, so that each byte can be checked."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path as FilePath

import torch

from .keys import chunk_keys
from .layout import KVLayout, Namespace

Path = tuple[int, ...]

CHUNK_TOKENS = 8
LAYOUT = KVLayout(
    num_layers=2, num_kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=CHUNK_TOKENS
)
CHUNK_BYTES = LAYOUT.chunk_bytes
FILE_BYTES = 4096 + CHUNK_BYTES
NAMESPACE = Namespace(model="tests/tiny", revision="1", layout=LAYOUT)


def content_of(path: Path, num_bytes: int) -> bytes:
    """The bytes that belong to the last chunk of `path`, and to no other."""
    seed = hashlib.sha256(repr(path).encode()).digest()
    return (seed * (num_bytes // len(seed) + 1))[:num_bytes]


def tokens_of(path: Path) -> list[int]:
    """A whole chunk of tokens per number of the path."""
    return [number for number in path for _ in range(CHUNK_TOKENS)]


def keys_of(path: Path, namespace: Namespace = NAMESPACE) -> list[bytes]:
    return chunk_keys(tokens_of(path), namespace)


def chunks_of(path: Path, start: int = 0) -> list[torch.Tensor]:
    return [tensor_of(path[: index + 1]) for index in range(start, len(path))]


def tensor_of(path: Path) -> torch.Tensor:
    content = bytearray(content_of(path, CHUNK_BYTES))
    return torch.frombuffer(content, dtype=torch.float32).view(LAYOUT.shape(CHUNK_TOKENS))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def bytes_on_disk(root: FilePath) -> int:
    """Every byte of chunk data below a store's directory, temporary and dropped files too.

    A file that is renamed meanwhile counts once.
    """
    sizes: dict[int, int] = {}
    for folder in ("tmp", "chunks", "dropped"):
        for parent, _, names in os.walk(root / folder):
            for name in names:
                with suppress(FileNotFoundError):
                    status = os.stat(f"{parent}/{name}")
                    sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def chunk_files(root: FilePath) -> list[FilePath]:
    return sorted((root / "chunks").rglob("*.kv"))
