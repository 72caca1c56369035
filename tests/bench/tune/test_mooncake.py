import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rootcellar.bench.tune.loading import load_trace

LINES = [
    {"timestamp": 500, "input_length": 1100, "output_length": 7, "hash_ids": [40, 41, 42]},
    {"timestamp": 500, "input_length": 1536, "output_length": 8, "hash_ids": [40, 41, 77]},
    {"timestamp": 27_000, "input_length": 0, "output_length": 9, "hash_ids": []},
    {"timestamp": 2000, "input_length": 3, "output_length": 1, "hash_ids": [2**64 - 1]},
]


def write(path: Path, records: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_blocks_of_512_tokens_are_chunks_the_last_one_too(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path / "chat.jsonl", LINES))
    trace.check_integrity()
    assert (trace.name, trace.chunk_tokens) == ("chat.jsonl", 512)
    assert trace.ids.tolist() == [0, 1, 2, 0, 1, 3, 4]
    assert trace.offsets.tolist() == [0, 3, 6, 7, 7]
    assert trace.times_s.tolist() == [0, 0, 1.5, 26.5]
    assert trace.input_tokens.tolist() == [1100, 1536, 3, 0]
    assert trace.output_tokens.tolist() == [7, 8, 1, 9]
    assert any("blocks of 512 tokens" in note for note in trace.notes)


def test_an_id_after_another_one_is_another_chunk(tmp_path: Path) -> None:
    """Should ids ever name a block's text alone, what they name is still a whole prefix."""
    records = [dict(LINES[0], hash_ids=ids) for ids in ([1, 2], [3, 2], [1, 2])]
    trace = load_trace(write(tmp_path / "t", records))
    trace.check_integrity()
    assert trace.ids.tolist() == [0, 1, 2, 3, 0, 1]


def test_more_blocks_than_the_prompt_fills_say_that_blocks_are_smaller(tmp_path: Path) -> None:
    path = write(tmp_path / "t", [LINES[0], dict(LINES[0], input_length=1024)])
    with pytest.raises(ValueError, match=r"t, line 2: 3 blocks of 512 tokens in .* at most 2"):
        load_trace(path)
