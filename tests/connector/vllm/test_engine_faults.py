"""Chunk files damaged under a running engine, and a disk that is full or turns read-only."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rootcellar.tiers.chunk_file import HEADER_BYTES
from rootcellar.tiers.toy import chunk_files
from rootcellar.tiers.verify import verify_store

from .engines import CHUNK_BYTES, CHUNK_TOKENS, Engine, assert_same, engine, plain, store, tokens

PROMPT = tokens(2000)
NUM_CHUNKS = 7
OTHERS = [tokens(2000, seed=seed) for seed in range(1, 4)]


def _truncate(path: Path) -> None:
    os.truncate(path, HEADER_BYTES + CHUNK_BYTES // 2)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + CHUNK_BYTES // 3] ^= 0x10
    path.write_bytes(content)


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def test_a_damaged_chunk_is_recomputed_counted_and_gone_and_what_is_before_it_still_hits(
    llama: Path, tmp_path: Path
) -> None:
    root = tmp_path / "kv"
    expected = plain(llama, [PROMPT])
    # The other prompts drive this one out of DRAM, so that each round reads it from NVMe.
    with engine(llama, store(root, dram=f"{16 * CHUNK_BYTES}B", admission="lru")) as served:
        files = _files_in_order(served, root)
        for damage in (_truncate, _flip, _zero, os.unlink):
            for victim in (0, 3, NUM_CHUNKS - 1):
                served.ask(OTHERS)
                served.settle()
                served.forget()
                before = _lost(served)
                damage(files[victim])
                answers = served.ask([PROMPT])
                assert_same(answers, expected)
                assert answers[0].cached == victim * CHUNK_TOKENS
                assert _lost(served) == before + 1
                served.check_at_rest()
    assert verify_store(root, progress=lambda done, total: None)["bad"] == []


def _files_in_order(served: Engine, root: Path) -> list[Path]:
    """The files of PROMPT's chunks, head first: each prompt extends the one before by a chunk."""
    found: list[Path] = []
    for count in range(1, NUM_CHUNKS + 1):
        served.ask([PROMPT[: count * CHUNK_TOKENS]], 1)
        served.settle()
        (new,) = set(chunk_files(root)) - set(found)
        found.append(new)
    return found


def _lost(served: Engine) -> int:
    """Chunks that failed verification, or whose file was missing."""
    stats = served.manager.store.stats()
    return int(stats["nvme"]["corrupt_chunks"]) + int(stats["why_not"].get("missing", 0))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB: room for some 14 chunk files."""
    root = tmp_path / "disk"
    root.mkdir()
    _mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(root))
    yield root
    subprocess.run(["umount", str(root)], check=True)


def test_when_the_disk_is_full_the_engine_serves_on(llama: Path, small_disk: Path) -> None:
    with engine(
        llama, store(small_disk / "kv", nvme="1GiB", write_down="eager", admission="lru")
    ) as served:
        _serves_on(llama, served)


def test_when_the_disk_turns_read_only_the_engine_serves_on(llama: Path, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    with engine(llama, store(root, write_down="eager", admission="lru")) as served:
        served.ask([PROMPT])
        served.settle()
        # Whatever is opened by its path from now on is on a read-only file system.
        _mount("--bind", str(root), str(root))
        try:
            _mount("-o", "remount,bind,ro", str(root))
            _serves_on(llama, served)
        finally:
            subprocess.run(["umount", "--lazy", str(root)], check=True)


def _serves_on(model: Path, served: Engine) -> None:
    """While writes fail: right answers, hits from DRAM, and a count of what is not on NVMe."""
    prompts = [PROMPT, *OTHERS]
    cold = served.ask(prompts)
    served.step_until_idle()
    served.forget()
    warm = served.ask(prompts)
    served.step_until_idle()
    assert_same(warm, cold)
    assert [answer.cached for answer in warm] == [NUM_CHUNKS * CHUNK_TOKENS] * len(prompts)
    assert served.manager.store.stats()["why_not"].get("could not be written", 0) > 0
    served.manager.store.check_integrity()


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"may not mount a file system here: {done.stderr.strip()}")
