import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rootcellar.bench.tune.loading import load_trace

REAL = Path(__file__).parents[4] / "shared" / "traces"

MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
BAILIAN = MOONCAKE | {"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1}
SESSION = {"block_size": 64, "requests": []}


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(("record", "chunk_tokens"), [(MOONCAKE, 512), (BAILIAN, 256)])
def test_the_format_shows_in_the_records_whatever_the_name(
    tmp_path: Path, record: dict[str, Any], chunk_tokens: int
) -> None:
    assert load_trace(write(tmp_path / "x.csv.gz", record)).chunk_tokens == chunk_tokens


def test_a_compressed_file_is_read_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_bytes(gzip.compress(write(tmp_path / "t", MOONCAKE, MOONCAKE).read_bytes()))
    assert load_trace(str(path)).ids.tolist() == [0, 1, 0, 1]


def test_blank_lines_and_a_missing_last_newline_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(f"\n{json.dumps(MOONCAKE)}\n  \n\n{json.dumps(MOONCAKE)}")
    assert load_trace(path).num_requests == 2


def test_progress_counts_bytes_on_disk_and_ends_at_all_of_them(tmp_path: Path) -> None:
    text = write(tmp_path / "t", *[MOONCAKE] * 5000).read_bytes()
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(text))
    told: list[tuple[int, int]] = []
    load_trace(path, progress=lambda done, total: told.append((done, total)))
    size = path.stat().st_size
    assert {total for _, total in told} == {size}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (size, size)
    assert len(told) > 10


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n",
            "Azure.* do not say which prompts begin alike",
        ),
        (
            '{"timestamp": 17, "input": "user: Below", "output": "me", "session_id": "a"}\n',
            r"'timestamp', 'input', 'output', 'session_id' does not say which prompts begin alike",
        ),
        ('[{"id": "a", "conversations": []}]', "does not begin with a JSON object"),
        ('{\n"block_size": 64, "requests": []}\n', "no JSON object on one line"),
        ("\0\1\2" * 100_000, "does not begin with a JSON object"),
        ("[]\n", "does not begin with a JSON object"),
    ],
    ids=["azure", "text", "sharegpt", "pretty", "binary", "list"],
)
def test_what_has_no_prefix_identity_is_refused_with_what_is_read(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"t, line 1: .*{reason}") as caught:
        load_trace(path)
    if "JSON object on one line (" not in str(caught.value):
        assert "Mooncake, Qwen-Bailian, kv-cache-tester" in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", json.dumps(SESSION)], ids=["empty", "blank", "none"])
def test_a_file_without_a_request_is_no_trace(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no request"):
        load_trace(path)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"timestamp": 0, "input_le', r"no JSON object on one line"),
        ("17", "no JSON object"),
        ('"x"', "no JSON object"),
        (b"\xff\xfe\xff".decode("latin1"), ""),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps(MOONCAKE | {"timestamp": "now"}), "timestamp is 'now'"),
        (json.dumps(MOONCAKE | {"timestamp": float("nan")}), "timestamp is nan"),
        (json.dumps(MOONCAKE | {"timestamp": True}), "timestamp is True"),
        (json.dumps(MOONCAKE | {"timestamp": 10**400}), "too large"),
        (json.dumps(MOONCAKE | {"input_length": -1}), "input_length is -1"),
        (json.dumps(MOONCAKE | {"output_length": 1.5}), "output_length is 1.5"),
        (json.dumps(MOONCAKE | {"input_length": 10**15}), "must be a whole number from 0 to"),
        (json.dumps(MOONCAKE | {"hash_ids": [1, -2]}), r"hash_ids is \[1, -2\], must be"),
        (json.dumps(MOONCAKE | {"hash_ids": [1, 2**64]}), "hash_ids is"),
        (json.dumps(MOONCAKE | {"hash_ids": "ab"}), "hash_ids is 'ab'"),
        ('{"timestamp": 3, "input_length": 5, "output_length": 1}', "hash_ids is None"),
    ],
)
def test_a_broken_line_is_named_with_its_fault(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "t.jsonl"
    text = f"{json.dumps(MOONCAKE)}\n\n{line}\n{json.dumps(MOONCAKE)}\n"
    path.write_text(text, encoding="latin1")
    with pytest.raises(ValueError, match=rf"{path}, line 3: .*{fault}"):
        load_trace(path)


@pytest.mark.parametrize("cut", [-4, 15])
def test_a_compressed_file_that_is_cut_off_or_broken_is_named(tmp_path: Path, cut: int) -> None:
    packed = bytearray(gzip.compress(write(tmp_path / "t", *[MOONCAKE] * 99).read_bytes()))
    packed[cut:] = packed[cut:][::-1] if cut > 0 else b""
    path = tmp_path / "t.gz"
    path.write_bytes(packed)
    with pytest.raises(ValueError, match=rf"{path} is no whole .gz file"):
        load_trace(path)


def test_a_directory_of_anything_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "day"
    folder.mkdir()
    write(folder / "a", MOONCAKE)
    with pytest.raises(ValueError, match="only if it is all kv-cache-tester sessions"):
        load_trace(folder)
    write(folder / "a", SESSION)
    write(folder / "b", MOONCAKE)
    with pytest.raises(ValueError, match=r"b, line 1: .*only if it is all"):
        load_trace(folder)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "t")


@pytest.mark.parametrize(
    ("name", "requests", "refs", "distinct", "chunk_tokens"),
    [
        ("mooncake/conversation_first_half.jsonl", 6015, 153_002, 100_131, 512),
        ("mooncake/synthetic_first_half.jsonl", 1996, 49_401, 33_131, 512),
        ("agentic/sessions_150.rle.jsonl.gz", 10_969, 5_131_126, 191_968, 256),
    ],
)
def test_real_traces_have_the_chunks_that_were_counted_another_way(
    name: str, requests: int, refs: int, distinct: int, chunk_tokens: int
) -> None:
    if not (REAL / name).exists():
        pytest.skip("the real traces are not here")
    trace = load_trace(REAL / name)
    trace.check_integrity()
    assert (trace.num_requests, trace.refs, trace.distinct) == (requests, refs, distinct)
    assert trace.chunk_tokens == chunk_tokens
    assert trace.ids.dtype == np.int32
    assert (trace.input_tokens >= np.diff(trace.offsets) * (chunk_tokens == 256) * 256).all()
