import gc
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.tiers import index as index_module
from rootcellar.tiers.chunk_file import file_bytes
from rootcellar.tiers.index import (
    Change,
    Delete,
    Put,
    Row,
    Touch,
    commit,
    environment,
    identity,
    load,
    rewrite,
    row_of,
    set_trusted,
)
from rootcellar.tiers.io.base import Codec
from rootcellar.tiers.io.testing import NAMESPACE, key_of, meta_of

NUMBERS = st.integers(0, 3)
GENERATIONS = st.integers(1, 2)


def _row(number: int, generation: int = 1, last_use_s: float = 1.5, hits: int = 2) -> Row:
    meta = meta_of(number, number + 1, generation=generation, codec=Codec.ZSTD_PLANES)
    return row_of(meta, file_bytes(meta.stored_bytes, meta.codec), last_use_s, hits)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [_row(number, last_use_s=number / 7, hits=number) for number in range(500)]
    rewrite(tmp_path / "index", rows, [])
    loaded = load(tmp_path / "index")
    assert sorted(loaded.rows) == sorted(rows)
    assert all(row.meta == meta_of(n, n + 1, codec=Codec.ZSTD_PLANES) for n, row in enumerate(rows))
    assert gc.isenabled()


@dataclass
class _Model:
    """What the changes mean, as a dict."""

    rows: dict[bytes, Row] = field(default_factory=dict[bytes, Row])

    def apply(self, change: Change) -> None:
        match change:
            case Put(row=row):
                self.rows[row.key] = row
            case Delete(key=key, identity=wanted):
                held = self.rows.get(key)
                if held and wanted in (b"", identity(held.namespace, held.generation)):
                    del self.rows[key]
            case Touch(key=key, last_use_s=last_use_s, hits=hits):
                if key in self.rows:
                    self.rows[key] = self.rows[key]._replace(last_use_s=last_use_s, hits=hits)


CHANGES: st.SearchStrategy[Change] = st.one_of(
    st.builds(Put, st.builds(_row, NUMBERS, GENERATIONS)),
    st.builds(Delete, NUMBERS.map(key_of)),
    st.builds(Delete, NUMBERS.map(key_of), st.builds(identity, st.just(NAMESPACE), GENERATIONS)),
    st.builds(Touch, NUMBERS.map(key_of), st.floats(0, 1e10), st.integers(0, 2**32 - 1)),
)


@given(batches=st.lists(st.lists(CHANGES, max_size=6), max_size=4))
def test_changes_do_what_they_would_to_a_dict(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Change]]
) -> None:
    path, model = tmp_path_factory.mktemp("index"), _Model()
    with environment(path) as env:
        for batch in batches:
            commit(env, batch)
            for change in batch:
                model.apply(change)
    assert {row.key: row for row in load(path).rows} == model.rows


def test_it_grows_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_FIRST_MAP_BYTES", 1 << 16)
    rows = [_row(number) for number in range(3000)]
    rewrite(tmp_path / "index", rows, [])
    assert len(load(tmp_path / "index").rows) == 3000


def test_an_index_larger_than_the_first_map_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(tmp_path / "index", [_row(number) for number in range(3000)], [])
    monkeypatch.setattr(index_module, "_FIRST_MAP_BYTES", 1 << 16)
    rewrite(tmp_path / "index", [_row(5000)], [key_of(0)])
    assert len(load(tmp_path / "index").rows) == 3000


def test_deleting_comes_before_putting(tmp_path: Path) -> None:
    rewrite(tmp_path / "index", [_row(1)], [key_of(1)])
    assert load(tmp_path / "index").rows == [_row(1)]


def test_trust_stays_until_it_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "index"
    rewrite(path, [_row(1)], [])
    assert not load(path).trusted
    rewrite(path, [_row(2)], [], trust=True)
    assert load(path).trusted
    rewrite(path, [_row(3)], [])
    assert load(path).trusted
    with environment(path) as env:
        assert set_trusted(env, False)
        assert not set_trusted(env, False)
    assert not load(path).trusted
    assert len(load(path).rows) == 3


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    rewrite(tmp_path / "index", [], [])
    assert (tmp_path / "index").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "index").iterdir()} == {0o600}


def test_an_index_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((lmdb.Error, OSError)):
        load(tmp_path / "index")
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("left", [0.3, 0.6, 0.9])
def test_one_that_was_cut_is_an_error_and_not_a_crash(tmp_path: Path, left: float) -> None:
    rewrite(tmp_path / "index", [_row(number) for number in range(500)], [])
    data = tmp_path / "index" / "data.mdb"
    os.truncate(data, int(data.stat().st_size * left) // 4096 * 4096)
    with pytest.raises(lmdb.Error):
        load(tmp_path / "index")


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"x" * 8192])
def test_one_that_is_junk_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "data.mdb").write_bytes(content)
    with pytest.raises((lmdb.Error, OSError)):
        load(tmp_path / "index")


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"short", bytes(113)), (bytes(32), b"short"), (bytes(32), b"\x07" * 113)],
    ids=["key", "length", "codec"],
)
def test_rows_that_are_none_are_an_error(tmp_path: Path, key: bytes, value: bytes) -> None:
    with environment(tmp_path / "index") as env, env.begin(write=True) as txn:
        txn.put(key, value)
    with pytest.raises(lmdb.CorruptedError, match="is no row"):
        load(tmp_path / "index")


@pytest.mark.parametrize(
    "nonsense",
    [
        {"num_tokens": 0},
        {"num_tokens": 1 << 31},
        {"stored_bytes": 0},
        {"payload_bytes": 1 << 63},
        {"file_bytes": 4096},
        {"codec": Codec.RAW, "stored_bytes": 16000},
    ],
    ids=str,
)
def test_a_row_that_makes_no_sense_makes_the_index_worthless(
    tmp_path: Path, nonsense: dict[str, Any]
) -> None:
    rewrite(tmp_path / "index", [_row(1), _row(2)._replace(**nonsense)], [])
    with pytest.raises(lmdb.CorruptedError):
        load(tmp_path / "index")
