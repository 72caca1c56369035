"""Equal weights have equal revisions wherever they lie; a changed byte never goes unseen."""

import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rootcellar.connector.vllm.weights import weights_revision

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOGGER = "rootcellar.connector.vllm.weights"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return _write(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "kv" / "weights.json"


def _write(path: Path) -> Path:
    path.mkdir(parents=True)
    for i in (1, 2):
        (path / f"model-{i}-of-2.safetensors").write_bytes(bytes(range(256)) * 40_000 * i)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    return path


def _local(model: Path, cache: Path | None = None) -> str:
    return weights_revision(str(model), None, None, cache)


def _files_read(caplog: pytest.LogCaptureFixture, model: Path, cache: Path) -> tuple[str, int]:
    caplog.clear()
    with caplog.at_level(logging.INFO, LOGGER):
        revision = _local(model, cache)
    return revision, sum(map(int, re.findall(r"in (\d+) files", caplog.text)))


def _flip_first(file: Path) -> None:
    with file.open("r+b") as handle:
        first = handle.read(1)[0]
        handle.seek(0)
        handle.write(bytes([first ^ 1]))


def _flip_behind_its_mtime(file: Path) -> None:
    before = file.stat()
    _flip_first(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _flip_last(file: Path) -> None:
    with file.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        last = handle.read(1)[0]
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([last ^ 0x80]))


def _append(file: Path) -> None:
    with file.open("ab") as handle:
        handle.write(b"\0")


def _rename(file: Path) -> None:
    file.rename(file.with_name("model-0-of-2.safetensors"))


def _exchange(file: Path) -> None:
    other = file.with_name("model-2-of-2.safetensors")
    content, others = file.read_bytes(), other.read_bytes()
    file.write_bytes(others)
    other.write_bytes(content)


def _add_file(file: Path) -> None:
    file.with_name("extra.safetensors").write_bytes(b"more")


def _add_tower(file: Path) -> None:
    file.with_name("vision_tower").mkdir()
    file.with_name("vision_tower").joinpath("model.safetensors").write_bytes(b"more")


def _edit_code(file: Path) -> None:
    file.with_name("modeling_ours.py").write_text("scale = 2")


def _edit_index(file: Path) -> None:
    file.with_name("model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}')


CHANGES = [
    _flip_first,
    _flip_behind_its_mtime,
    _flip_last,
    _append,
    _rename,
    _exchange,
    Path.unlink,
    _add_file,
    _add_tower,
    _edit_code,
    _edit_index,
]


def test_equal_files_have_one_revision_wherever_they_lie(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(model, copy)
    assert _local(copy) == _local(model)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_changes_the_revision_though_the_old_one_is_remembered(
    model: Path, cache: Path, change: Callable[[Path], object]
) -> None:
    before = _local(model, cache)
    change(model / "model-1-of-2.safetensors")
    assert _local(model, cache) != before
    assert _local(model, cache) == _local(model)


@given(position=st.integers(0, 255 * 1000), bit=st.integers(0, 7))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bit_goes_unseen(tmp_path: Path, position: int, bit: int) -> None:
    file = tmp_path / "one.gguf"
    content = bytearray(bytes(range(255)) * 1001)
    file.write_bytes(content)
    before = _local(file)
    content[position] ^= 1 << bit
    file.write_bytes(content)
    assert _local(file) != before


def test_what_computes_nothing_changes_nothing(model: Path) -> None:
    before = _local(model)
    (model / "tokenizer.json").write_text('{"chat_template": "other"}')
    (model / "README.md").write_text("news")
    (model / "training_args.bin").write_bytes(b"optimizer state")
    for name in ("checkpoint-500", "original", ".cache", "__pycache__"):
        (model / name).mkdir()
        (model / name / "model.safetensors").write_bytes(b"another model")
    assert _local(model) == before


def test_a_restart_reads_nothing(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = _files_read(caplog, model, cache)
    assert first[1] == 3
    assert _files_read(caplog, model, cache) == (first[0], 0)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    assert [file.name for file in cache.parent.iterdir()] == ["weights.json"]


def test_only_what_looks_touched_is_read_again(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, _ = _files_read(caplog, model, cache)
    os.utime(model / "model-2-of-2.safetensors", (1, 1))
    assert _files_read(caplog, model, cache) == (before, 1)
    assert _files_read(caplog, model, cache) == (before, 0)


def test_reading_says_once_how_much_and_how_long(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        _local(model)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "GiB of weights in 3 files in" in caplog.text


def test_two_models_may_be_remembered_in_one_file(
    model: Path, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = _write(tmp_path / "other")
    _flip_first(other / "model-1-of-2.safetensors")
    first, second = _local(model, cache), _local(other, cache)
    assert first != second
    assert _files_read(caplog, model, cache) == (first, 0)
    assert _files_read(caplog, other, cache) == (second, 0)


ENTRY = ["1", "2", "3", "4", "0" * 32]
NONSENSE: list[Any] = [
    "not JSON {",
    "",
    "\0\0\0",
    "[" * 100_000,
    [],
    {"a": []},
    {"a": ["1"]},
    {"a": [1, 2, 3, 4, 5]},
    {"a": [*ENTRY[:4], "short"]},
    {"a": ["-1", *ENTRY[1:]]},
    {"a": [*ENTRY, "more"]},
]


@pytest.mark.parametrize("content", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_in_the_memory_is_not_believed(model: Path, cache: Path, content: Any) -> None:
    expected = _local(model)
    cache.parent.mkdir()
    cache.write_text(content if isinstance(content, str) else json.dumps(content))
    assert _local(model, cache) == expected
    assert len(json.loads(cache.read_text())) == 3


def test_one_wrong_entry_discredits_the_whole_memory(model: Path, cache: Path) -> None:
    expected = _local(model, cache)
    known = json.loads(cache.read_text())
    forged = {path: [*entry[:4], "f" * 32] for path, entry in known.items()}
    cache.write_text(json.dumps(forged | {"a": None}))
    assert _local(model, cache) == expected


def test_the_memory_is_bounded_and_forgets_the_oldest(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text(json.dumps({f"/gone/{i}": ENTRY for i in range(5000)}))
    _local(model, cache)
    known = list(json.loads(cache.read_text()))
    assert len(known) == 4096
    assert known[-4] == "/gone/4999"
    assert _files_read(caplog, model, cache)[1] == 0


def test_a_memory_that_cannot_be_written_costs_only_time(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a directory")
    assert _local(model, tmp_path / "file" / "weights.json") == _local(model)
    missing = tmp_path / "unmounted" / "kv" / "weights.json"
    assert _local(model, missing) == _local(model)
    assert not (tmp_path / "unmounted").exists()


def _snapshot(hub: Path, model: Path) -> Path:
    """The model as the hub's cache keeps it: links into blobs named by content."""
    repository = hub / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for i, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, repository / "blobs" / f"{i:064}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{i:064}")
    return snapshot


def test_a_snapshot_of_the_hub_cache_is_its_commit(model: Path, tmp_path: Path) -> None:
    snapshot = _snapshot(tmp_path / "hub", model)
    assert _local(snapshot) == f"commit {COMMIT}"
    assert weights_revision("org/name", None, COMMIT, None) == f"commit {COMMIT}"


def test_a_snapshot_with_files_of_someones_own_is_read(model: Path, tmp_path: Path) -> None:
    snapshot = _snapshot(tmp_path / "hub", model)
    file = snapshot / "model-1-of-2.safetensors"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    assert _local(snapshot) == _local(model)


def test_links_to_files_count_by_what_they_lead_to(model: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    assert _local(linked) == _local(model)
    (tmp_path / "tower").mkdir()
    (tmp_path / "tower" / "model.safetensors").write_bytes(b"vision")
    (linked / "vision_tower").symlink_to(tmp_path / "tower")
    (linked / "loop").symlink_to(linked)
    before = _local(linked)
    assert before != _local(model)
    _flip_first(tmp_path / "tower" / "model.safetensors")
    assert _local(linked) != before


def test_a_name_on_the_hub_is_the_commit_it_was_resolved_to() -> None:
    assert weights_revision("org/name", "main", COMMIT, None) == f"commit {COMMIT}"
    assert weights_revision("org/name", COMMIT, None, None) == f"commit {COMMIT}"


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT[:12], COMMIT + "0"])
def test_a_name_without_a_commit_is_refused(revision: str | None) -> None:
    with pytest.raises(ValueError, match="set weights_id in kv_connector_extra_config"):
        weights_revision("org/name", revision, None, None)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "modeling.py").write_text("")
    with pytest.raises(ValueError, match=r"no weight files .*\.safetensors.*weights_id"):
        _local(tmp_path)


def test_a_commit_of_the_configuration_says_nothing_of_a_local_directory(model: Path) -> None:
    assert weights_revision(str(model), COMMIT, COMMIT, None) == _local(model)
