import json
from pathlib import Path

from rootcellar.bench.tune.loading import load_trace


def record(time_s: float, num_tokens: int, ids: list[int], parent: int = -1) -> dict[str, object]:
    return {
        "chat_id": 159,
        "parent_chat_id": parent,
        "timestamp": time_s,
        "input_length": num_tokens,
        "output_length": 132,
        "type": "text",
        "turn": 1 if parent < 0 else 2,
        "hash_ids": ids,
    }


def test_sixteen_blocks_of_16_tokens_are_a_chunk(tmp_path: Path) -> None:
    first, other = list(range(100, 140)), [*range(100, 131), 7, *range(132, 140)]
    records = [
        record(61.25, 640, first),
        record(62.0, 640, other, parent=159),
        record(63.0, 511, first[:32]),
        record(64.0, 512, first[:32]),
        record(65.0, 10, [100]),
    ]
    path = tmp_path / "qwen.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    trace = load_trace(path)
    trace.check_integrity()
    assert trace.chunk_tokens == 256
    chains = [
        trace.ids[begin:end].tolist()
        for begin, end in zip(trace.offsets, trace.offsets[1:], strict=False)
    ]
    # The third prompt's last block is not full, and so is not its second chunk.
    assert chains == [[0, 1], [0, 2], [0], [0, 1], []]
    assert trace.times_s.tolist() == [0, 0.75, 1.75, 2.75, 3.75]
    assert trace.output_tokens.tolist() == [132] * 5
    assert any("16 blocks of 16 tokens are folded into a chunk of 256" in n for n in trace.notes)
