"""Transfers that a worker cannot launch: they cost chunks, and no request and no engine."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rootcellar.tiers.movers import Lane
from rootcellar.tiers.transfer import CopyJob, Transfer

from .engines import (
    CHUNK_TOKENS,
    Engine,
    assert_same,
    engine,
    greedy,
    offer,
    plain,
    store,
    tokens,
    whole_chunks,
)
from .models import save_model

PROMPT = tokens(2000)
WHOLE = whole_chunks(len(PROMPT))
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 2 * CHUNK_TOKENS}
"""A prompt is computed, and stored, in several steps."""


@dataclass
class Refusal:
    """Which launches fail, of all transfers of this process."""

    loads: bool = False
    stores: bool = False
    num_refused: int = 0

    def check(self, job: CopyJob) -> None:
        if self.loads if job.loads else self.stores:
            self.num_refused += 1
            raise RuntimeError("the device refuses a launch")


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refusal:
    refusal, launch = Refusal(), Transfer._launch

    def launch_or_refuse(transfer: Transfer, job: CopyJob, lanes: deque[Lane]) -> None:
        refusal.check(job)
        launch(transfer, job, lanes)

    monkeypatch.setattr(Transfer, "_launch", launch_or_refuse)
    return refusal


def _dropped(served: Engine) -> int:
    return int(served.manager.store.stats()["dropped_stores"])


def _start_storing(served: Engine) -> None:
    """A request "a", until a store is ordered, which the workers begin in the next step."""
    served.llm.llm_engine.add_request("a", offer(PROMPT), greedy(50))
    while not served.manager._stores():
        served.llm.llm_engine.step()


@pytest.mark.parametrize("family", ["llama", "gemma", "mistral"])
def test_chunks_whose_store_fails_are_not_served_and_later_stores_work(
    models: Path, tmp_path: Path, refuse: Refusal, family: str
) -> None:
    model = save_model(models / f"failing-{family}", family)
    expected = plain(model, [PROMPT], **SETTINGS)
    with engine(model, store(tmp_path / "kv"), **SETTINGS) as served:
        refuse.stores = True
        assert_same(served.ask([PROMPT]), expected)
        served.check_at_rest()
        assert _dropped(served) > 0
        refuse.stores = False
        for cached in (0, WHOLE):
            served.forget()
            answers = served.ask([PROMPT])
            assert_same(answers, expected)
            assert answers[0].cached == cached
            served.check_at_rest()


@pytest.mark.parametrize("family", ["llama", "gemma", "mistral"])
def test_what_a_failed_load_should_have_brought_is_computed_and_stays_in_the_store(
    models: Path, tmp_path: Path, refuse: Refusal, family: str
) -> None:
    model = save_model(models / f"failing-{family}", family)
    expected = plain(model, [PROMPT], **SETTINGS)
    with engine(model, store(tmp_path / "kv"), **SETTINGS) as served:
        served.ask([PROMPT])
        served.settle()
        served.forget()
        refuse.loads = True
        assert_same(served.ask([PROMPT]), expected)
        assert refuse.num_refused == 1, "the same load again would fail again"
        assert sum(served.manager.store.stats()["hit_tokens"].values()) == 0
        served.check_at_rest()
        refuse.loads = False
        served.forget()
        answers = served.ask([PROMPT])
        assert_same(answers, expected)
        assert answers[0].cached == WHOLE
        served.check_at_rest()


@pytest.mark.parametrize("reset", [False, True], ids=["aborted", "reset"])
def test_a_store_that_fails_when_its_request_or_its_job_is_gone_leaves_nothing_behind(
    llama: Path, tmp_path: Path, refuse: Refusal, reset: bool
) -> None:
    expected = plain(llama, [PROMPT], **SETTINGS)
    with engine(llama, store(tmp_path / "kv"), **SETTINGS) as served:
        _start_storing(served)
        if reset:
            served.llm.reset_prefix_cache(reset_connector=True)
        else:
            served.llm.llm_engine.abort_request(["a"])
        refuse.stores = True
        served.check_at_rest()
        assert refuse.num_refused > 0
        refuse.stores = False
        for cached in (0, WHOLE):
            served.forget()
            answers = served.ask([PROMPT])
            assert_same(answers, expected)
            assert answers[0].cached == cached
            served.check_at_rest()
