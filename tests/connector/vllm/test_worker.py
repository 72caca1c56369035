import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from rootcellar.connector.vllm import worker as worker_module
from rootcellar.connector.vllm.pages import PageLayout
from rootcellar.connector.vllm.partial import fills_chunks
from rootcellar.connector.vllm.slots import SlotSpec
from rootcellar.connector.vllm.worker import SlotWorker, make_worker
from rootcellar.tiers.arena import ArenaAddress, SharedArena
from rootcellar.tiers.io.testing import open_files

from .toy_pages import (
    NUM_SLOTS,
    Cache,
    Case,
    Shape,
    Transfer,
    cases,
    check_round_trip,
    cpu_worker,
    open_arena,
)

SHAPE = Shape(tensors=[(24, 24), (7, 11)], groups=[[(0, 24), (1, 5)], [(1, 7)]], blocks_per_chunk=2)
STORED = Transfer([(4, [9, 3, 4, 5]), (0, [1, 0])], slots=[8, 2, 5])


@pytest.fixture
def arena() -> Iterator[SharedArena]:
    arena = open_arena(2, SHAPE)
    yield arena
    arena.close()


@pytest.fixture
def cache() -> Cache:
    return Cache(SHAPE, seed=1)


@pytest.fixture
def worker(cache: Cache) -> Iterator[SlotWorker]:
    worker = cpu_worker(cache.layout())
    yield worker
    worker.shutdown()


@given(case=cases())
@settings(max_examples=300)
def test_what_was_stored_is_loaded_and_nothing_else_is_touched(case: Case) -> None:
    check_round_trip(case, cpu_worker, lambda: None)


def test_a_chunk_lies_rank_after_rank_ref_after_ref_block_after_block(arena: SharedArena) -> None:
    shape = Shape(tensors=[(2, 2), (3, 4)], groups=[[(0, 2), (1, 3)]], blocks_per_chunk=2)
    cache = Cache(shape, seed=0)
    for tensor, block, content in [(0, 7, b"aa"), (0, 5, b"bb"), (1, 7, b"ccc"), (1, 5, b"ddd")]:
        page = cache.page_at(tensor, block)
        cache.memory[tensor][page : page + len(content)] = list(content)
    for rank in range(2):
        worker = cpu_worker(cache.layout(rank))
        worker.submit_store(1, *_both(Transfer([(2, [7, 5])], [3]), arena))
        worker.shutdown()
    assert bytes(arena.slot(3)[:20]) == b"aabbcccddd" * 2


def _both(transfer: Transfer, arena: SharedArena) -> tuple[GPULoadStoreSpec, SlotSpec]:
    return transfer.pages, transfer.into(arena)


def test_time_and_bytes_of_a_transfer_are_told_once(
    worker: SlotWorker, arena: SharedArena, cache: Cache
) -> None:
    worker.submit_store(7, *_both(STORED, arena))
    worker.wait({7, 8})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success) == (7, True)
    assert result.transfer_size == STORED.num_bytes(cache) == 4 * (24 + 5) + 2 * 7
    assert result.transfer_time is not None
    assert result.transfer_time >= 0
    assert worker.get_finished() == []


WRONG: list[tuple[Transfer, str]] = [
    (replace(STORED, slots=[8, 2]), "2 slots for 3 chunks"),
    (replace(STORED, slots=[8, 2, 5, 1]), "4 slots for 3 chunks"),
    (Transfer([(5, [9, 3, 4, 5]), (0, [1, 0])], [8, 2, 5]), "3 slots for 4 chunks"),
    (Transfer([(4, [9, 3, 4, 5])], [8, 2]), "1 KV-cache groups, must be 2"),
    (replace(STORED, slots=[8, NUM_SLOTS, 5]), "slot is 9, must be from 0 to 8"),
    (replace(STORED, slots=[8, -1, 5]), "slot is -1"),
    (Transfer([(4, [9, 3, 30, 5]), (0, [1, 0])], [8, 2, 5]), "block is 30, must be from 0 to 29"),
    (Transfer([(4, [9, 3, -1, 5]), (0, [1, 0])], [8, 2, 5]), "block is -1"),
]


@pytest.mark.parametrize(("transfer", "message"), WRONG)
def test_what_does_not_belong_together_raises_before_a_byte_moves(
    worker: SlotWorker, arena: SharedArena, cache: Cache, transfer: Transfer, message: str
) -> None:
    before = bytes(arena.buffer), [memory.tobytes() for memory in cache.memory]
    with pytest.raises(ValueError, match=message):
        worker.submit_load(1, transfer.into(arena), transfer.pages)
    with pytest.raises(ValueError, match=r"must be|slots for|does not fill"):
        worker.submit_store(1, *_both(transfer, arena))
    assert (bytes(arena.buffer), [memory.tobytes() for memory in cache.memory]) == before
    assert worker.get_finished() == []


@pytest.mark.parametrize(
    "groups",
    [
        [(5, [9]), (0, [1, 0])],  # what a sliding window drops leads a chunk
        [(4, [9, 3, 4]), (0, [1, 0])],
    ],
)
def test_a_store_that_leaves_a_hole_in_a_chunk_raises(
    worker: SlotWorker, arena: SharedArena, groups: list[tuple[int, list[int]]]
) -> None:
    transfer = Transfer(groups, [8, 2, 5] if len(groups[0][1]) > 1 else [8, 5])
    assert not fills_chunks(*_both(transfer, arena), SHAPE.blocks_per_chunk)
    with pytest.raises(ValueError, match="does not fill"):
        worker.submit_store(1, *_both(transfer, arena))
    assert fills_chunks(*_both(STORED, arena), SHAPE.blocks_per_chunk)


def test_a_chunk_that_does_not_fit_in_its_slice_is_refused_at_once(cache: Cache) -> None:
    def layout(**changed: Any) -> PageLayout:
        given = {"blocks_per_chunk": 2, "rank": 0, "rank_bytes": 58, "replicated": False}
        return PageLayout(cache.canonical(), **(given | changed))

    layout()
    with pytest.raises(ValueError, match=r"group 0 takes 58 bytes per rank, rank_bytes is 57"):
        layout(rank_bytes=57)
    with pytest.raises(ValueError, match=r"blocks_per_chunk is 0"):
        layout(blocks_per_chunk=0)


def test_slots_without_room_for_this_rank_are_refused(cache: Cache) -> None:
    arena = open_arena(1, SHAPE)
    worker = cpu_worker(cache.layout(rank=arena.slot_bytes // SHAPE.rank_bytes))
    with pytest.raises(ValueError, match=r"slots have 4096 bytes, this rank needs 4118"):
        worker.submit_store(1, *_both(STORED, arena))
    arena.close()


def test_tensors_that_are_no_rows_of_bytes_are_refused(cache: Cache) -> None:
    caches = cache.canonical()
    caches.tensors[1].tensor = torch.zeros((30, 11), dtype=torch.int16)
    with pytest.raises(ValueError, match=r"KV-cache tensor 1 is torch\.int16"):
        make_worker(caches, blocks_per_chunk=2, rank=0, rank_bytes=99, replicated=False)


def test_a_page_larger_than_its_row_is_refused(cache: Cache) -> None:
    caches = cache.canonical()
    caches.group_data_refs[1][0].page_size_bytes = 8
    with pytest.raises(ValueError, match="a page is 8 bytes, must be from 1 to 7"):
        make_worker(caches, blocks_per_chunk=2, rank=0, rank_bytes=99, replicated=False)


def test_the_worker_is_chosen_by_the_device(cache: Cache) -> None:
    def make(device: str) -> Any:
        caches = cache.canonical()
        for tensor in caches.tensors:
            tensor.tensor = tensor.tensor.to(device)
        return make_worker(caches, blocks_per_chunk=2, rank=0, rank_bytes=99, replicated=False)

    assert isinstance(make("cpu"), SlotWorker)
    with pytest.raises(ValueError, match="on meta, must be on cpu or cuda"):
        make("meta")


def test_a_worker_that_is_made_has_copied_and_changed_nothing(cache: Cache) -> None:
    before = [memory.tobytes() for memory in cache.memory]
    caches = cache.canonical()
    worker = make_worker(caches, blocks_per_chunk=2, rank=0, rank_bytes=99, replicated=False)
    assert worker.get_finished() == []
    assert [memory.tobytes() for memory in cache.memory] == before


def test_the_largest_chunk_has_room_in_a_buffer(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MIN_STAGING_BYTES", 1)
    make_worker(
        cache.canonical(), blocks_per_chunk=9, rank=0, rank_bytes=9 * 29, replicated=False
    )  # moves one of each group


def test_another_arena_takes_the_place_of_the_first(worker: SlotWorker, cache: Cache) -> None:
    before = open_files()
    arenas = [open_arena(1, SHAPE) for _ in range(3)]
    for arena in arenas:
        worker.submit_store(1, *_both(STORED, arena))
        for tensor, page, at, size in STORED.places(cache, arena.slot_bytes, 0):
            expected = cache.memory[tensor][page : page + size].tobytes()
            assert bytes(arena.buffer[at : at + size]) == expected
    worker.shutdown()
    worker.shutdown()
    for arena in arenas:
        arena.close()
    assert open_files() == before


def test_transfers_fail_and_the_engine_goes_on_when_the_arena_cannot_be_mapped(
    worker: SlotWorker, arena: SharedArena, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    slots = STORED.into(arena)
    before = [memory.tobytes() for memory in cache.memory]
    arena.close()
    with caplog.at_level(logging.CRITICAL):
        worker.submit_store(1, STORED.pages, slots)
        worker.submit_load(2, slots, STORED.pages)
    assert {result.job_id for result in worker.get_finished()} == {1, 2}
    assert worker.take_failed() == {1, 2}
    assert [memory.tobytes() for memory in cache.memory] == before


WORKER = """
import json, sys
import numpy as np, torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec)
from rootcellar.connector.vllm.slots import SlotSpec
from rootcellar.connector.vllm.worker import make_worker
from rootcellar.tiers.arena import ArenaAddress

memory = torch.arange(240, dtype=torch.uint8).view(torch.int8).view(30, 8)
caches = CanonicalKVCaches([CanonicalKVCacheTensor(memory, 8)], [[CanonicalKVCacheRef(0, 8)]])
worker = make_worker(caches, blocks_per_chunk=2, rank=1, rank_bytes=16, replicated=False)
for line in sys.stdin:
    verb, address, slots, blocks = json.loads(line)
    pages = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
    spec = SlotSpec(ArenaAddress(*address), tuple(slots))
    if verb == "store":
        worker.submit_store(1, pages, spec)
    else:
        worker.submit_load(1, spec, pages)
    (result,) = worker.get_finished()
    print(json.dumps([result.transfer_size, memory[blocks].flatten().tolist()]), flush=True)
"""


def test_two_processes_exchange_chunks_through_the_arena(arena: SharedArena) -> None:
    command = [sys.executable, "-P", "-c", WORKER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(verb: str, slots: list[int], blocks: list[int]) -> tuple[int, list[int]]:
            assert process.stdin is not None
            assert process.stdout is not None
            at = arena.shared_at
            address = [at.pid, at.fd, at.slot_bytes, at.num_slots]
            process.stdin.write(json.dumps([verb, address, slots, blocks]) + "\n")
            process.stdin.flush()
            size, content = json.loads(process.stdout.readline())
            return size, content

        before = bytes(arena.buffer)
        assert ask("store", [6, 1], [29, 2, 3, 0])[0] == 32
        assert bytes(arena.slot(6)[16:32]) == bytes([*range(232, 240), *range(16, 24)])
        assert bytes(arena.slot(1)[16:32]) == bytes([*range(24, 32), *range(0, 8)])
        arena.slot(6)[16:32] = before[6 * arena.slot_bytes + 16 : 6 * arena.slot_bytes + 32]
        arena.slot(1)[16:32] = before[arena.slot_bytes + 16 : arena.slot_bytes + 32]
        assert bytes(arena.buffer) == before
        arena.slot(4)[16:32] = bytes(range(100, 116))
        size, content = ask("load", [4], [11, 7])
        assert size == 16
        assert content == list(range(100, 116))
        process.stdin.close()
        assert process.wait() == 0


OWNER = """
import sys
from rootcellar.tiers.arena import SharedArena
arena = SharedArena(4096, 9)
print(arena.fd, flush=True)
sys.stdin.read()
"""


def test_memory_of_a_killed_owner_stays_as_long_as_a_worker_maps_it(
    worker: SlotWorker, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-P", "-c", OWNER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        address = ArenaAddress(owner.pid, int(owner.stdout.readline()), 4096, NUM_SLOTS)
        slots = SlotSpec(address, tuple(STORED.slots))
        worker.submit_store(1, STORED.pages, slots)
        owner.kill()
        owner.wait()
        kept = [memory.tobytes() for memory in cache.memory]
        for tensor, page, _, size in STORED.places(cache, 4096, 0):
            cache.memory[tensor][page : page + size] = 0
        worker.submit_load(2, slots, STORED.pages)
        assert [memory.tobytes() for memory in cache.memory] == kept
    late = cpu_worker(cache.layout())
    with caplog.at_level(logging.CRITICAL):
        late.submit_load(1, slots, STORED.pages)
    assert [result.job_id for result in late.get_finished()] == [1]
    assert late.take_failed() == {1}
