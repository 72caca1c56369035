"""Requests that end before, during and after their loads leave nothing pinned."""

import random
from pathlib import Path

import pytest

from .engines import CHUNK_BYTES, Engine, assert_same, engine, greedy, offer, plain, store, tokens
from .models import save_model

PROMPTS = [
    tokens(1000 + 100 * seed, seed=seed // 2) + tokens(99, seed=50 + seed) for seed in range(6)
]
"""Two by two with a common prefix."""
ROUNDS = 200


@pytest.mark.parametrize(
    ("family", "dram_chunks"),
    [("llama", 64), ("llama", 8), ("gemma", 16)],
    ids=["roomy DRAM", "scarce DRAM", "scarce DRAM and two cache groups"],
)
def test_after_hundreds_of_aborted_requests_nothing_is_pinned_and_answers_are_right(
    models: Path, tmp_path: Path, family: str, dram_chunks: int
) -> None:
    model = save_model(models / f"aborted-{family}", family)
    expected = plain(model, PROMPTS)
    rng = random.Random(dram_chunks)
    with engine(model, store(tmp_path / "kv", dram=f"{dram_chunks * CHUNK_BYTES}B")) as aborted:
        for turn in range(ROUNDS):
            _start_and_abort(aborted, rng, turn)
            if turn % 10 == 9:
                aborted.check_at_rest()
            if turn == ROUNDS // 2:
                # As after an update of the weights, with transfers under way.
                _start_and_abort(aborted, rng, turn, reset_connector=True)
        aborted.forget()
        assert_same(aborted.ask(PROMPTS), expected)
        aborted.settle()
        aborted.forget()
        assert_same(aborted.ask(PROMPTS), expected)
        assert sum(aborted.manager.store.stats()["hit_tokens"].values()) > 0
        aborted.check_at_rest()


def _start_and_abort(
    aborted: Engine, rng: random.Random, turn: int, reset_connector: bool = False
) -> None:
    """Up to four requests; each is aborted after up to six steps, wherever it is by then."""
    requests = aborted.llm.llm_engine
    ids = [f"{turn}-{i}" for i in range(rng.randint(1, 4))]
    for name in ids:
        requests.add_request(name, offer(rng.choice(PROMPTS)), greedy(rng.choice((1, 8))))
    for name in rng.sample(ids, len(ids)):
        for _ in range(rng.randrange(6)):
            requests.step()
        if reset_connector:
            # What runs goes on in the HBM that it has; only the store is emptied.
            aborted.llm.reset_prefix_cache(reset_connector=True)
        requests.abort_request([name])
    if rng.random() < 0.5:
        aborted.step_until_idle()
        aborted.forget()
