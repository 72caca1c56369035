from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rootcellar.tiers.config import CodecName, StoreConfig
from rootcellar.tiers.errors import FormatVersionError, StoreLockedError
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import (
    CHUNK_BYTES,
    FILE_BYTES,
    NAMESPACE,
    bytes_on_disk,
    chunk_files,
    chunks_of,
    keys_of,
)
from rootcellar.tiers.verify import table, verify_store


def _config(root: Path, codec: CodecName = "raw") -> StoreConfig:
    return StoreConfig(
        dram_bytes=8 * CHUNK_BYTES,
        nvme_path=root,
        nvme_bytes=32 * FILE_BYTES,
        io="threads",
        codec=codec,
    )


@pytest.fixture(params=["raw", "zstd"])
def root(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A store with two chains that share their head, and a chunk of another namespace."""
    path = tmp_path / "store"
    with TieredStore(_config(path, request.param), NAMESPACE) as store:
        for chain in ((1, 2, 3), (1, 4)):
            store.put(keys_of(chain), chunks_of(chain))
    other = replace(NAMESPACE, revision="2")
    with TieredStore(_config(path, request.param), other) as store:
        store.put(keys_of((7,), other), chunks_of((7,)))
    return path


def _file(root: Path, chain: tuple[int, ...]) -> Path:
    name = keys_of(chain)[-1].hex()
    return next(path for path in chunk_files(root) if path.stem == name)


def _verify(root: Path, *, repair: bool = False) -> dict[str, Any]:
    return verify_store(root, repair=repair, progress=lambda done, total: None)


def test_a_whole_store_is_found_whole(root: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify_store(root, progress=lambda done, total: seen.append((done, total)))
    assert (report["chunks"], report["bad"], report["orphans"]) == (5, [], 0)
    assert report["bytes"] == bytes_on_disk(root)
    assert seen == [(number, 5) for number in range(1, 6)]
    assert "read 5 files" in _shown(report)
    assert "0 bad, 0 below" in _shown(report)


@pytest.mark.parametrize(
    ("offset", "why"),
    [(20, "its header is damaged"), (4000, "its header is damaged"), (4100, "its payload")],
)
def test_one_flipped_bit_is_found(root: Path, offset: int, why: str) -> None:
    path = _file(root, (1, 2))
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)
    report = _verify(root)
    assert report["bad"] == [{"file": str(path), "why": _found(report)}]
    assert why in _found(report)
    assert path.name in _shown(report).replace("\n", "")
    assert report["orphans"] == 1  # the chunk below it


def _shown(report: dict[str, Any]) -> str:
    console = Console(width=300, file=StringIO())
    console.print(table(report))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def _found(report: dict[str, Any]) -> str:
    bad = report["bad"]
    assert isinstance(bad, list)
    assert len(bad) == 1
    return str(bad[0]["why"])


@pytest.mark.parametrize("keep", [0, 100, 4096, 4097])
def test_a_file_that_was_cut_is_found(root: Path, keep: int) -> None:
    path = _file(root, (1, 4))
    path.write_bytes(path.read_bytes()[:keep])
    assert _found(_verify(root))


def test_a_file_under_the_name_of_another_is_found(root: Path) -> None:
    _file(root, (1, 4)).write_bytes(_file(root, (1, 2)).read_bytes())
    assert _found(_verify(root)) == "it holds another chunk"


def test_a_stray_file_is_found(root: Path) -> None:
    (chunk_files(root)[0].parent / "notes.txt").write_text("hello")
    assert _found(_verify(root)) == "its header is damaged"


def test_repair_drops_the_bad_and_what_hangs_from_it_and_nothing_else(root: Path) -> None:
    path = _file(root, (1, 2))
    path.write_bytes(bytes(len(path.read_bytes())))
    assert _verify(root, repair=True)["dropped"] == 2
    after = _verify(root)
    assert (after["chunks"], after["bad"], after["orphans"]) == (3, [], 0)
    with TieredStore(_config(root), NAMESPACE) as store:
        assert [store.lookup(keys_of(chain)).num_chunks for chain in ((1, 2, 3), (1, 4))] == [1, 2]


def test_without_repair_nothing_changes(root: Path) -> None:
    path = _file(root, (1,))
    path.write_bytes(b"")
    before = sorted((file, file.read_bytes()) for file in chunk_files(root))
    _verify(root)
    assert sorted((file, file.read_bytes()) for file in chunk_files(root)) == before


def test_a_store_in_use_is_left_alone(root: Path) -> None:
    with TieredStore(_config(root), NAMESPACE), pytest.raises(StoreLockedError):
        _verify(root)


def test_what_is_no_store_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a store"):
        _verify(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        _verify(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_a_newer_format_is_refused(root: Path) -> None:
    (root / "FORMAT").write_text('{"format": "rootcellar", "version": 99}')
    with pytest.raises(FormatVersionError, match="version 99"):
        _verify(root)
