import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.inspect import inspect_store, table
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    FILE_BYTES,
    NAMESPACE,
    bytes_on_disk,
    chunks_of,
    keys_of,
)

OTHER = replace(NAMESPACE, revision="2")


def _config(root: Path) -> StoreConfig:
    return StoreConfig(
        dram_bytes=8 * CHUNK_BYTES, nvme_path=root, nvme_bytes=32 * FILE_BYTES, io="threads"
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    with TieredStore(_config(path), NAMESPACE) as store:
        store.put(keys_of((1, 2)), chunks_of((1, 2)))
        store.flush()  # hits are counted from then on
        for _ in range(3):
            store.get(keys_of((1,)))
    with TieredStore(_config(path), OTHER) as store:
        store.put(keys_of((7,), OTHER), chunks_of((7,)))
    return path


def test_it_tells_namespaces_chunks_bytes_ages_and_hits(root: Path) -> None:
    report = inspect_store(root)
    spaces = {space["namespace"]: space for space in report["namespaces"]}
    assert spaces.keys() == {NAMESPACE.digest.hex(), OTHER.digest.hex()}
    space = spaces[NAMESPACE.digest.hex()]
    assert (space["chunks"], space["tokens"]) == (2, 2 * CHUNK_TOKENS)
    assert (space["bytes"], space["hits"], space["chunks_never_hit"]) == (2 * FILE_BYTES, 3, 1)
    assert 0 <= space["newest_use_s"] <= space["oldest_use_s"]
    assert report["bytes"] == bytes_on_disk(root)
    assert report["held_by_pid"] is None
    assert table(report).row_count == 2


def test_it_reads_a_store_that_is_open(root: Path) -> None:
    with TieredStore(_config(root), NAMESPACE) as store:
        store.put(keys_of((5,)), chunks_of((5,)))
        store.flush()
        report = inspect_store(root)
    assert report["held_by_pid"] == os.getpid()
    assert sum(space["chunks"] for space in report["namespaces"]) == 4


def test_without_its_index_it_reads_the_headers(root: Path) -> None:
    shutil.rmtree(root / "index.lmdb")
    assert sum(space["chunks"] for space in inspect_store(root)["namespaces"]) == 3


def test_it_changes_nothing(root: Path) -> None:
    def content() -> dict[Path, bytes]:
        files = (path for path in root.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files if path.name != "lock.mdb"}

    before = content()
    inspect_store(root)
    assert content() == before


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a store"):
        inspect_store(tmp_path)
