"""Many requests, and too little room in HBM or DRAM: slower, and otherwise the same."""

from pathlib import Path
from typing import Any

import pytest

from .engines import CHUNK_BYTES, assert_same, engine, plain, store, tokens

PREFIXES = [tokens(512, seed=seed) for seed in range(8)]
PROMPTS = [PREFIXES[i % 8] + tokens(150 + i, seed=100 + i) for i in range(64)]
ANSWER = 120
"""More tokens than are left in the last block of a prompt, so that decoding needs new blocks."""
BLOCKS = 40
"""Of 128 tokens: room for five or six requests, of 64 that may run at once."""


@pytest.mark.parametrize("dram_chunks", [200, 12], ids=["roomy DRAM", "scarce DRAM"])
def test_while_vllm_preempts_every_answer_is_right_and_nothing_stays_pinned(
    llama: Path, tmp_path: Path, dram_chunks: int
) -> None:
    settings: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 64}
    expected = plain(llama, PROMPTS, ANSWER, **settings)
    knobs = store(tmp_path / "kv", dram=f"{dram_chunks * CHUNK_BYTES}B")
    with engine(llama, knobs, num_gpu_blocks_override=BLOCKS, **settings) as crowded:
        preempted = crowded.count_preemptions()
        for _ in range(2):
            assert_same(crowded.ask(PROMPTS, ANSWER), expected)
            crowded.check_at_rest()
            crowded.forget()
        assert len(preempted) > 0
        assert sum(crowded.manager.store.stats()["hit_tokens"].values()) > 0
