"""Ranks that cannot launch copies, under vLLM's own scheduler."""

import logging
from collections.abc import Iterator
from pathlib import Path
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.request import Request, RequestStatus

from rootcellar.connector.vllm.failures import WorkerMeta

from .engines import tokens
from .toy_ranks import CHUNK_TOKENS, NUM_RANKS, Engine, config_of

PROMPT = tokens(4 * CHUNK_TOKENS + 50)
PROMPTS = [PROMPT, PROMPT[: 3 * CHUNK_TOKENS], PROMPT[: 2 * CHUNK_TOKENS] + tokens(700, seed=1)]
WHOLE = 4 * CHUNK_TOKENS


@pytest.fixture(scope="module")
def config(llama: Path) -> VllmConfig:
    return config_of(llama, dram_chunks=10)


@pytest.fixture
def toy(config: VllmConfig) -> Iterator[Engine]:
    toy = Engine(config, Random(0))
    yield toy
    toy.close()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="rootcellar")


def hit_tokens(toy: Engine) -> int:
    return int(toy.manager.store.stats()["hit_tokens"]["dram"])


def dropped_chunks(toy: Engine) -> int:
    return int(toy.manager.store.stats()["dropped_stores"])


def serve(toy: Engine) -> int:
    """A request for PROMPT, with nothing of it in HBM; returns the tokens that were loaded."""
    toy.forget()
    before = hit_tokens(toy)
    request = toy.ask(PROMPT)
    toy.run()
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    toy.check_at_rest()
    return hit_tokens(toy) - before


def start_storing(toy: Engine) -> Request:
    """A request for PROMPT, until a store is ordered, which the ranks begin in the next step."""
    request = toy.ask(PROMPT)
    while not toy.manager._stores():
        toy.step()
    return request


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_store_that_fails_on_any_rank_drops_the_chunks_and_later_ones_work(
    toy: Engine, rank: int
) -> None:
    toy.ranks[rank].device.launches_left = 0
    assert serve(toy) == 0
    assert dropped_chunks(toy) > 0
    toy.ranks[rank].device.launches_left = None
    assert serve(toy) == 0
    assert serve(toy) == WHOLE


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_what_was_stored_before_a_store_that_failed_is_served(toy: Engine, rank: int) -> None:
    start_storing(toy)
    toy.step()  # launches the first store, and orders the second
    toy.ranks[rank].device.launches_left = 0
    toy.run()
    toy.ranks[rank].device.launches_left = None
    assert serve(toy) == WHOLE // 2


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_load_that_fails_on_any_rank_is_computed_and_its_chunks_stay(
    toy: Engine, rank: int
) -> None:
    serve(toy)
    toy.ranks[rank].device.launches_left = 0
    assert serve(toy) == 0
    assert toy.manager._lookups.missed_chunks == 2 * WHOLE // CHUNK_TOKENS
    toy.ranks[rank].device.launches_left = None
    assert serve(toy) == WHOLE


@pytest.mark.parametrize("reset", [False, True], ids=["aborted", "reset"])
def test_a_store_that_fails_when_its_request_or_its_job_is_gone_leaves_nothing_behind(
    toy: Engine, reset: bool
) -> None:
    request = start_storing(toy)
    if reset:
        toy.scheduler.reset_prefix_cache(reset_connector=True)
    toy.abort(request.request_id)
    toy.ranks[0].device.launches_left = 0
    toy.run()
    toy.check_at_rest()
    toy.ranks[0].device.launches_left = None
    assert [serve(toy), serve(toy)] == [0, WHOLE]


metas = st.builds(
    WorkerMeta,
    st.dictionaries(st.integers(0, 5), st.just(1)),
    failed_jobs=st.sets(st.integers(0, 5)),
)


@given(ranks=st.lists(metas, min_size=1, max_size=4))
def test_ranks_tell_together_what_each_told(ranks: list[WorkerMeta]) -> None:
    merged: OffloadingWorkerMetadata = ranks[0]
    for rank in ranks[1:]:
        merged = merged.aggregate(rank)
    assert isinstance(merged, WorkerMeta)
    assert merged.failed_jobs == set[int]().union(*(rank.failed_jobs for rank in ranks))
    for job_id in range(6):
        told = sum(rank.completed_jobs.get(job_id, 0) for rank in ranks)
        assert merged.completed_jobs.get(job_id, 0) == told


class FailingRanks(RuleBasedStateMachine):
    """Devices refuse launches at any time. Every page that a rank reads is checked as it goes."""

    config: VllmConfig

    def __init__(self) -> None:
        super().__init__()
        self.random = Random(0)
        self.toy = Engine(self.config, self.random)
        self.requests: list[Request] = []

    @rule(seed=st.integers(0, 1 << 20))
    def choose_otherwise(self, seed: int) -> None:
        self.random.seed(seed)

    @rule(rank=st.integers(0, NUM_RANKS - 1), left=st.sampled_from([0, 1, 3, None, None]))
    def refuse(self, rank: int, left: int | None) -> None:
        self.toy.ranks[rank].device.launches_left = left

    @precondition(lambda self: len(self.requests) < 4)
    @rule(prompt=st.sampled_from(PROMPTS), num_tokens=st.sampled_from([1, 300]))
    def ask(self, prompt: list[int], num_tokens: int) -> None:
        self.requests.append(self.toy.ask(prompt, num_tokens))

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.toy.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.toy.abort(request.request_id)

    @rule()
    def end_and_forget(self) -> None:
        self.toy.run()
        for request in self.requests:
            assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        self.requests.clear()
        self.toy.check_at_rest()
        self.toy.forget()

    # vLLM takes no second reset before the step that has the ranks finish what the first forgot.
    @precondition(lambda self: not self.toy.connector.scheduler._current_batch_jobs_to_flush)
    @rule(preempt=st.booleans())
    def reset(self, preempt: bool) -> None:
        self.toy.scheduler.reset_prefix_cache(preempt, reset_connector=True)

    def teardown(self) -> None:
        self.end_and_forget()
        for rank in self.toy.ranks:
            rank.device.launches_left = None
        serve(self.toy)
        assert serve(self.toy) == WHOLE
        self.toy.close()


def test_whatever_fails_no_rank_reads_a_wrong_page_and_no_request_fails(config: VllmConfig) -> None:
    FailingRanks.config = config
    run_state_machine_as_test(
        FailingRanks,
        settings=settings(
            max_examples=30,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
