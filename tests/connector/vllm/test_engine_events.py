"""vLLM's KV events say what came into the cold tiers and what left them, block by block."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from rootcellar.tiers.toy import chunk_files

from .engines import Engine, engine, store, tokens

BLOCK_TOKENS = 128
EVENTS = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}


class Listener:
    """Keeps what the connector tells, and what is left of it at the end."""

    def __init__(self, told_by: Engine) -> None:
        self.events: list[Any] = []
        connector = told_by.scheduler.connector
        take = connector.take_events

        def recorded() -> Iterable[Any]:
            events = list(take())
            self.events += events
            return events

        connector.take_events = recorded

    def blocks(self, medium: str) -> set[Any]:
        held: set[Any] = set()
        for event in self.events:
            assert not isinstance(event, AllBlocksCleared)
            if event.medium == medium:
                change = held.update if isinstance(event, BlockStored) else held.difference_update
                change(event.block_hashes)
        return held


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_blocks_are_told_with_their_tokens_and_tier(llama: Path, root: Path) -> None:
    prompt = tokens(600)
    with engine(llama, store(root), **EVENTS) as told_by:
        listener = Listener(told_by)
        told_by.ask([prompt])
        told_by.settle()
        told_by.ask([tokens(300, seed=9)])
        stored = [event for event in listener.events if isinstance(event, BlockStored)]
        first = [e for e in stored if e.medium == "CPU"][:2]
        assert [event.block_size for event in first] == [BLOCK_TOKENS] * 2
        assert [len(event.block_hashes) for event in first] == [2, 2]
        assert [t for event in first for t in event.token_ids] == prompt[:512]
        assert first[0].parent_block_hash is None
        assert first[1].parent_block_hash == first[0].block_hashes[-1]
        assert {event.medium for event in stored} == {"CPU", "STORAGE"}
        assert len(listener.blocks("STORAGE") & listener.blocks("CPU")) >= 4


def test_what_is_evicted_is_told(llama: Path, root: Path) -> None:
    small = store(root, dram="1MiB", nvme="2MiB")
    with engine(llama, small, **EVENTS) as told_by:
        listener = Listener(told_by)
        for seed in range(6):
            told_by.ask([tokens(600, seed=seed)])
            told_by.settle()
        told_by.ask([tokens(100, seed=99)])
        assert any(isinstance(event, BlockRemoved) for event in listener.events)
        dram = told_by.manager.store.stats()["dram"]
        assert len(listener.blocks("CPU")) == 2 * dram["slots_used"]
        assert len(listener.blocks("STORAGE")) == 2 * len(chunk_files(root))


def test_a_reset_tells_every_block_gone(llama: Path, root: Path) -> None:
    with engine(llama, store(root), **EVENTS) as told_by:
        listener = Listener(told_by)
        told_by.ask([tokens(600)])
        told_by.settle()
        assert told_by.llm.reset_prefix_cache(reset_connector=True)
        told_by.ask([tokens(100, seed=9)])
        assert any(isinstance(event, BlockRemoved) for event in listener.events)
        assert listener.blocks("CPU") == listener.blocks("STORAGE") == set()


def test_what_an_earlier_start_stored_is_told_when_it_is_asked_for(llama: Path, root: Path) -> None:
    with engine(llama, store(root)) as earlier:
        earlier.ask([tokens(600)])
        earlier.settle()
    with engine(llama, store(root), **EVENTS) as told_by:
        listener = Listener(told_by)
        assert told_by.ask([tokens(600)])[0].cached == 512
        told_by.settle()
        assert len(listener.blocks("STORAGE")) == 4
