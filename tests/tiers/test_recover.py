"""Directories as crashes, other versions and other hands leave them, and what opening makes of
them."""

import asyncio
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.tiers.chunk_file import chunk_path, folder_name
from rootcellar.tiers.errors import StoreLockedError
from rootcellar.tiers.index import Put, Row, commit, environment, load, row_of, set_trusted
from rootcellar.tiers.io.base import ChunkMeta, Codec, Status
from rootcellar.tiers.io.testing import (
    NAMESPACE,
    IoWorld,
    file_of,
    key_of,
    make_file,
    meta_of,
    open_files,
)
from rootcellar.tiers.recover import Recovered, open_directory

OTHER_NAMESPACE = key_of(99)


def _open(root: Path) -> Recovered:
    """Open and let go again."""
    recovered = open_directory(root)
    recovered.lock.close()
    return recovered


def _keys(recovered: Recovered) -> set[bytes]:
    return {row.key for row in recovered.entries}


def _row(meta: ChunkMeta, last_use_s: float = 1.0) -> Row:
    return row_of(meta, file_of(meta).file_bytes, last_use_s)


def _index(root: Path, *metas: ChunkMeta, trust: bool = True) -> None:
    """Add rows to the index; with trust, as at a clean end."""
    with environment(root / "index.lmdb") as env:
        commit(env, [Put(_row(meta)) for meta in metas])
        set_trusted(env, trust)


def _files(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in root.rglob("*.kv")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    _open(tmp_path / "store")
    return tmp_path / "store"


# What is right stays


def test_an_empty_store_has_nothing(root: Path) -> None:
    recovered = _open(root)
    assert (recovered.entries, recovered.dropped, recovered.generations) == ([], [], {})
    assert not recovered.repaired


def test_what_a_backend_wrote_is_there_with_its_use(tmp_path: Path) -> None:
    world = IoWorld(tmp_path / "store", "threads")
    metas = [meta_of(0), meta_of(1, 0, codec=Codec.ZSTD_PLANES), meta_of(2, 1, payload_bytes=100)]
    done = [world.write(meta) for meta in metas]
    world.close()
    recovered = _open(tmp_path / "store")
    assert not recovered.repaired
    assert recovered.generations == {NAMESPACE: 1}
    by_key = {row.key: row for row in recovered.entries}
    for meta, completion in zip(metas, done, strict=True):
        row = by_key[meta.key]
        assert row.file_bytes == completion.file_bytes
        assert row.meta.stored_bytes == completion.stored_bytes
        assert row.meta.parent == meta.parent


def test_the_least_recently_used_comes_first(root: Path) -> None:
    uses = {3: 5.0, 1: 7.0, 2: 6.0}
    for number in uses:
        make_file(root, meta_of(number))
    rows = [_row(meta_of(number), last_use_s) for number, last_use_s in uses.items()]
    with environment(root / "index.lmdb") as env:
        commit(env, map(Put, rows))
    assert [row.key for row in _open(root).entries] == [key_of(3), key_of(2), key_of(1)]


def test_files_the_index_does_not_know_are_taken_in(root: Path) -> None:
    for number in range(300):
        make_file(root, meta_of(number))
    recovered = _open(root)
    assert _keys(recovered) == {key_of(number) for number in range(300)}
    assert recovered.repaired == {"files without a row": 300}
    assert load(root / "index.lmdb").trusted
    assert not _open(root).repaired


def test_a_file_taken_in_was_last_used_when_it_was_written(root: Path) -> None:
    os.utime(make_file(root, meta_of(1)), (1234, 5678))
    assert [row.last_use_s for row in _open(root).entries] == [5678.0]


@pytest.mark.parametrize("damage", ["lost", "junk", "cut", "a file", "without its lock"])
def test_a_lost_index_is_rebuilt_from_headers(root: Path, damage: str) -> None:
    metas = [meta_of(number, number - 1 if number else None) for number in range(200)]
    for meta in metas:
        make_file(root, meta)
    _index(root, *metas)
    path = root / "index.lmdb"
    match damage:
        case "lost":
            shutil.rmtree(path)
        case "junk":
            (path / "data.mdb").write_bytes(b"junk" * 5000)
        case "cut":
            os.truncate(path / "data.mdb", 8192)
        case "a file":
            shutil.rmtree(path)
            path.write_text("junk")
        case _:
            (path / "lock.mdb").write_bytes(b"junk" * 5000)
    assert _keys(_open(root)) == {meta.key for meta in metas}
    again = _open(root)
    assert _keys(again) == {meta.key for meta in metas}
    assert not again.repaired


# What is wrong goes


def _flip(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)

    return flip


def _move(path: Path) -> None:
    other = path.parent.parent / "ff"
    other.mkdir(exist_ok=True)
    path.rename(other / path.name)


def _rename(path: Path) -> None:
    path.rename(path.with_name(f"{path.name[:2]}{key_of(77).hex()[2:]}.kv"))


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    (path / "deep").mkdir(parents=True)


def _replace_by_link(path: Path) -> None:
    """To a file that is right in all else, outside of the store."""
    elsewhere = path.rename(path.parents[4] / "elsewhere")
    path.symlink_to(elsewhere)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "magic": _flip(0),
    "version": _flip(9),
    "a field": _flip(60),
    "header checksum": _flip(4090),
    "no whole header": lambda path: os.truncate(path, 4095),
    "cut payload": lambda path: os.truncate(path, 8192),
    "a byte too many": lambda path: os.truncate(path, path.stat().st_size + 1),
    "in the wrong folder": _move,
    "under another key": _rename,
    "under an odd name": lambda path: path.rename(path.with_name("odd name")),
    "a level too high": lambda path: path.rename(path.parent.parent / path.name),
    "a folder": _replace_by_folder,
    "a link": _replace_by_link,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_what_its_name_says_is_deleted(root: Path, damage: str) -> None:
    right, wrong = meta_of(1), meta_of(2)
    make_file(root, right)
    DAMAGES[damage](make_file(root, wrong))
    recovered = _open(root)
    assert _keys(recovered) == {right.key}
    assert recovered.repaired["files deleted"] == 1
    assert list(_files(root)) == [f"{right.key.hex()}.kv"]
    assert not _open(root).repaired


def test_rows_without_a_file_are_dropped(root: Path) -> None:
    make_file(root, meta_of(1))
    gone = [meta_of(2), meta_of(3, generation=2), meta_of(4, namespace=OTHER_NAMESPACE)]
    _index(root, meta_of(1), *gone)
    recovered = _open(root)
    assert _keys(recovered) == {key_of(1)}
    assert recovered.repaired == {"rows without a file": 3}
    assert {row.key for row in load(root / "index.lmdb").rows} == {key_of(1)}


def test_after_an_unclean_end_a_file_of_a_wrong_size_is_deleted(root: Path) -> None:
    for number in (1, 2, 3):
        make_file(root, meta_of(number))
    os.truncate(chunk_path(str(root), meta_of(1)), 4096)
    os.truncate(chunk_path(str(root), meta_of(2)), 1 << 20)
    _index(root, meta_of(1), meta_of(2), meta_of(3), trust=False)
    recovered = _open(root)
    assert _keys(recovered) == {key_of(3)}
    assert recovered.repaired == {"files of a wrong size": 2}
    assert len(_files(root)) == 1


def test_after_a_clean_end_sizes_are_taken_from_the_index(root: Path) -> None:
    """Nobody else writes here; a file cut by other hands is found out when it is read."""
    os.truncate(make_file(root, meta_of(1)), 8192)
    _index(root, meta_of(1))
    assert _keys(_open(root)) == {key_of(1)}
    world = IoWorld(root, "threads")
    assert world.read(meta_of(1)).status is Status.CORRUPT
    world.close()


def test_chunks_below_a_missing_one_go_and_their_cousins_stay(root: Path) -> None:
    """0 - 1 - 2 - 3, with 4 below 1 and 5 below 2; 2 is lost."""
    parents = {0: None, 1: 0, 3: 2, 4: 1, 5: 2, 6: 5}
    for number, parent in parents.items():
        make_file(root, meta_of(number, parent))
    recovered = _open(root)
    assert _keys(recovered) == {key_of(number) for number in (0, 1, 4)}
    assert recovered.repaired["orphans"] == 3
    assert len(_files(root)) == 3
    assert not _open(root).repaired


def test_a_parent_in_another_namespace_is_no_parent(root: Path) -> None:
    make_file(root, meta_of(1, namespace=OTHER_NAMESPACE))
    make_file(root, meta_of(2, 1))
    assert _keys(_open(root)) == {key_of(1)}


def test_temporaries_are_swept(root: Path) -> None:
    (root / "tmp" / "half written").write_bytes(bytes(10_000))
    _open(root)
    assert os.listdir(root / "tmp") == []


# Folders


def test_only_the_newest_life_of_a_namespace_counts(root: Path) -> None:
    for generation in (2, 10, 1):
        make_file(root, meta_of(generation, generation=generation))
    make_file(root, meta_of(4, namespace=OTHER_NAMESPACE, generation=3))
    recovered = _open(root)
    assert recovered.generations == {NAMESPACE: 10, OTHER_NAMESPACE: 3}
    assert _keys(recovered) == {key_of(10), key_of(4)}
    size_bytes = file_of(meta_of(1)).file_bytes
    assert sorted(recovered.dropped) == [
        (folder_name(NAMESPACE, generation), size_bytes) for generation in (1, 2)
    ]


def test_an_older_life_is_dropped_even_if_the_newest_is_empty(root: Path) -> None:
    make_file(root, meta_of(1, generation=1))
    (root / "chunks" / folder_name(NAMESPACE, 2)).mkdir()
    recovered = _open(root)
    assert (recovered.entries, recovered.generations) == ([], {})
    assert [name for name, _ in recovered.dropped] == [folder_name(NAMESPACE, 1)]
    assert os.listdir(root / "chunks") == []
    assert _open(root).dropped == recovered.dropped


def test_folders_already_dropped_are_counted_and_another_of_that_name_fits(root: Path) -> None:
    name = folder_name(NAMESPACE, 1)
    for _ in range(2):
        make_file(root, meta_of(1, generation=1))
        (root / "chunks" / folder_name(NAMESPACE, 2)).mkdir()
        _open(root)
    sizes = dict(_open(root).dropped)
    assert len(sizes) == 2
    assert name in sizes
    assert set(sizes.values()) == {file_of(meta_of(1)).file_bytes}


def test_what_does_not_belong_is_put_out_of_the_way(root: Path) -> None:
    (root / "chunks" / "a folder").mkdir()
    (root / "chunks" / "a folder" / "a file").write_bytes(b"12345")
    (root / "chunks" / "a file").write_bytes(b"12345")
    recovered = _open(root)
    assert recovered.dropped == [("a folder", 5)]
    assert os.listdir(root / "chunks") == []


# The whole


@dataclass(frozen=True)
class _Case:
    """One chunk file. back: how far back the chunk lies that it hangs from; before the first
    there are only heads."""

    back: int
    indexed: bool
    state: str


CASES = st.lists(
    st.builds(
        _Case,
        back=st.integers(1, 4),
        indexed=st.booleans(),
        state=st.sampled_from(["whole", "whole", "whole", "gone", "torn", "spoilt"]),
    ),
    max_size=10,
)


def _survivors(cases: list[_Case]) -> set[int]:
    """Reached from a head over chunks that are all there; a spoilt header shows only when read."""
    reached: set[int] = set()
    for number, case in enumerate(cases):
        there = case.state == "whole" or (case.state == "spoilt" and case.indexed)
        if there and (number < case.back or number - case.back in reached):
            reached.add(number)
    return reached


@given(cases=CASES)
def test_what_stays_is_closed_counted_and_stable(
    tmp_path_factory: pytest.TempPathFactory, cases: list[_Case]
) -> None:
    root = tmp_path_factory.mktemp("store")
    _open(root)
    metas = [
        meta_of(number, number - case.back if number >= case.back else None, payload_bytes=9000)
        for number, case in enumerate(cases)
    ]
    for meta, case in zip(metas, cases, strict=True):
        path = make_file(root, meta)
        match case.state:
            case "gone":
                path.unlink()
            case "torn":
                os.truncate(path, 5000)
            case "spoilt":
                _flip(60)(path)
            case _:
                pass
    _index(root, *(m for m, case in zip(metas, cases, strict=True) if case.indexed), trust=False)
    recovered = _open(root)
    expected = {key_of(number) for number in _survivors(cases)}
    assert _keys(recovered) == expected
    assert {row.key for row in load(root / "index.lmdb").rows} == expected
    assert {f"{row.key.hex()}.kv": row.file_bytes for row in recovered.entries} == _files(root)
    again = _open(root)
    assert _keys(again) == expected
    assert not again.repaired


# Opening itself


def test_it_stays_locked_until_the_lock_is_closed(root: Path) -> None:
    recovered = open_directory(root)
    with pytest.raises(StoreLockedError):
        open_directory(root)
    recovered.lock.close()
    _open(root)


def test_it_also_opens_inside_a_running_loop(root: Path) -> None:
    make_file(root, meta_of(1))

    async def main() -> Recovered:
        return _open(root)

    assert len(asyncio.run(main()).entries) == 1


def test_a_disk_that_refuses_is_said_and_the_lock_is_free_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_file(root, meta_of(1))
    before = open_files()

    names_in = os.listdir

    def refuse(path: Path) -> list[str]:
        if path == root / "chunks":
            raise OSError(5, "Input/output error")
        return names_in(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        with pytest.raises(ValueError, match=r"store cannot be .*Input/output error"):
            open_directory(root)
    assert open_files() == before
    assert len(_open(root).entries) == 1


def test_an_index_that_cannot_be_written_does_not_keep_it_closed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_file(root, meta_of(1))

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rootcellar.tiers.recover.rewrite", refuse)
    recovered = _open(root)
    assert _keys(recovered) == {key_of(1)}
    assert recovered.repaired["index not written"] == 1
