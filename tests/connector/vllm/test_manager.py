"""The manager against an engine played by hypothesis: what was answered HIT can be loaded and is
what was stored, whatever is aborted, preempted, reset, slow or full in between."""

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    get_offload_group_idx,
    make_offload_key,
)

from rootcellar import KVLayout, Namespace, StoreConfig, TieredStore
from rootcellar.connector.vllm.manager import Manager
from rootcellar.connector.vllm.shape import Group, Shape

CHUNK_BYTES = 4096
BLOCKS = 2
TOKENS = 16 * BLOCKS
SESSIONS = 3
LENGTH = 6
"""Chunks of the longest prompt."""

LAYOUT = KVLayout(
    num_layers=1,
    kv_factor=1,
    num_kv_heads=1,
    head_dim=CHUNK_BYTES // TOKENS,
    dtype="uint8",
    chunk_tokens=TOKENS,
)
NAMESPACE = Namespace(model="toy", revision="1", layout=LAYOUT)


def hashes_of(session: int, num_chunks: int) -> list[bytes]:
    """Sessions share their first two chunks."""
    names = [f"{'all' if i < 2 * BLOCKS else session} {i}" for i in range(num_chunks * BLOCKS)]
    return [hashlib.sha256(name.encode()).digest() for name in names]


def shape_of(num_groups: int, windows: bool) -> Shape:
    """The second group has full attention, or the only one."""
    groups = tuple(
        Group(i, 16, full_attention=not windows and i == min(1, num_groups - 1))
        for i in range(num_groups)
    )
    return Shape(groups, BLOCKS, tokens_per_hash=16, hbm_chunks=8)


def bytes_of(key: OffloadKey) -> bytes:
    return hashlib.shake_128(key).digest(CHUNK_BYTES)


class Request:
    def __init__(
        self, number: int, session: int, num_chunks: int, groups: tuple[Group, ...]
    ) -> None:
        self.context = ReqContext(req_id=str(number))
        self.hashes = hashes_of(session, num_chunks)
        self.keys = {
            group.group_id: [
                make_offload_key(block_hash, group.group_id)
                for block_hash in self.hashes[BLOCKS - 1 :: BLOCKS]
            ]
            for group in groups
        }
        for keys in self.keys.values():
            for index, key in enumerate(keys):
                self.context.set_offload_key_position(key, (index + 1) * TOKENS)
        self.in_hbm = 0
        """Chunks that the engine has, loaded or computed; all of them were offered."""
        self.loading: list[OffloadKey] = []
        self.slots: tuple[int, ...] = ()
        self.storing: list[tuple[list[OffloadKey], dict[OffloadKey, int]]] = []
        self.ended = False
        self.computes_all = False
        """A load of it failed."""


class Engine(RuleBasedStateMachine):
    num_groups = 1
    windows = False
    dram_chunks = 6

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.store = TieredStore(
            StoreConfig(
                dram_bytes=self.dram_chunks * CHUNK_BYTES,
                nvme_path=self.folder / "store",
                nvme_bytes=40 * 2 * CHUNK_BYTES,
                io="threads",
                io_lanes=2,
            ),
            NAMESPACE,
        )
        self.manager = Manager()
        self.shape = shape_of(self.num_groups, self.windows)
        self.manager.open(self.store, self.shape, timeout_s=0.02, events=True)
        self.requests: list[Request] = []
        self.number = 0
        self.stored: set[OffloadKey] = set()
        for session in range(SESSIONS):
            self.serve(session, LENGTH)
        self.settle()

    def teardown(self) -> None:
        for request in self.requests:
            self.end(request)
        self.settle()
        assert self.manager._requests == {}
        assert self.manager._computes_all == set()
        assert self.manager._lookups._ahead == 0
        stats = self.store.stats()
        assert (stats["open_loads"], stats["dram"]["slots_pinned"]) == (0, 0)
        self.store.check_integrity()
        self.manager.shutdown()
        shutil.rmtree(self.folder)

    @property
    def alive(self) -> list[Request]:
        return [request for request in self.requests if not request.ended]

    @property
    def free(self) -> list[Request]:
        return [request for request in self.alive if not request.loading]

    @property
    def idle(self) -> list[Request]:
        return [request for request in self.free if not request.storing]

    def running(self, transfers: str) -> list[Request]:
        """Requests, ended ones too, that have such transfers under way."""
        return [request for request in self.requests if getattr(request, transfers)]

    # Rules -----------------------------------------------------------------------------------

    @rule(
        session=st.integers(0, SESSIONS - 1),
        num_chunks=st.integers(1, LENGTH),
        load_fails=st.booleans(),
    )
    def serve(self, session: int, num_chunks: int, load_fails: bool = False) -> None:
        """A request from its arrival to its end, with nothing in between."""
        request = self.receive(session, num_chunks)
        while not self.ask(request, run=True):
            self.store.flush(timeout_s=30)
        if request.loading:
            if load_fails:
                self.fail_load(request)
            self.complete_load(request)
            if load_fails:
                assert self.ask(request, run=True), "asked again, it need not wait"
        self.settle()  # so that DRAM has room for all of it
        self.offer(request, LENGTH)
        while request.storing:
            self.complete_store(request, 0, success=True)
        request.ended = True
        self.manager.on_request_finished(request.context)

    @rule(session=st.integers(0, SESSIONS - 1), num_chunks=st.integers(0, LENGTH))
    def arrive(self, session: int, num_chunks: int) -> None:
        self.receive(session, num_chunks)

    def receive(self, session: int, num_chunks: int) -> Request:
        request = Request(self.number, session, num_chunks, self.shape.groups)
        self.number += 1
        self.requests.append(request)
        self.manager.on_new_request(request.context)
        self.manager.arrived(request.context.req_id, request.hashes)
        return request

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), run=st.sampled_from([True, True, False]))
    def schedule(self, data: Any, run: bool) -> None:
        self.ask(data.draw(st.sampled_from(self.idle)), run)

    def ask(self, request: Request, run: bool) -> bool:
        """Ask as vLLM does for a request that is not running; with `run`, there was room for it.

        Returns whether there was an answer.
        """
        start = min(request.in_hbm, len(request.keys[0]))
        self.manager.ask(request.context.req_id, start * TOKENS)
        hits, wanted = 0, list[OffloadKey]()
        for key in request.keys[self.shape.main.group_id][start:]:
            result = self.manager.lookup(key, request.context)
            if result is LookupResult.RETRY:
                return False
            if result is LookupResult.MISS:
                break
            assert key in self.stored, "a chunk that was never stored is a hit"
            hits += 1
            wanted.append(key)
        assert self.manager.num_hits == hits
        assert not (request.computes_all and hits), "the load that failed would fail again"
        for group in self.shape.groups:
            if group != self.shape.main and hits:  # a window of one chunk
                key = request.keys[group.group_id][start + hits - 1]
                result = self.manager.lookup(key, request.context)
                if result is not LookupResult.HIT:
                    return result is LookupResult.MISS
                assert key in self.stored
                wanted = [key, *wanted] if group.group_id == 0 else [*wanted, key]
        if run and wanted:
            self.load(request, wanted)
            request.in_hbm = start + hits
        return True

    def load(self, request: Request, keys: list[OffloadKey]) -> None:
        spec: Any = self.manager.prepare_load(keys, request.context)
        request.loading, request.slots = keys, spec.slots
        for key in keys:
            assert self.manager.get_load_source(key, request.context).value in ("host", "disk")

    @precondition(lambda self: self.running("loading"))
    @rule(data=st.data())
    def loaded(self, data: Any) -> None:
        self.complete_load(data.draw(st.sampled_from(self.running("loading"))))

    @precondition(lambda self: self.running("loading"))
    @rule(data=st.data())
    def not_loaded(self, data: Any) -> None:
        """A worker could not fill the pages; another may still be at it."""
        request = data.draw(st.sampled_from(self.running("loading")))
        if not request.computes_all:
            self.fail_load(request)

    def fail_load(self, request: Request) -> None:
        self.manager.load_failed(request.context.req_id)
        request.in_hbm, request.computes_all = 0, True

    def complete_load(self, request: Request) -> None:
        hits = self.store.stats()["hit_chunks"]
        self.manager.complete_load(set(request.loading), request.context)
        request.loading = []
        assert (self.store.stats()["hit_chunks"] == hits) is request.computes_all

    @precondition(lambda self: self.free)
    @rule(data=st.data(), more=st.integers(1, LENGTH), lacking=st.integers(0, 4))
    def compute(self, data: Any, more: int, lacking: int) -> None:
        self.offer(data.draw(st.sampled_from(self.free)), more, lacking)

    def offer(self, request: Request, more: int, lacking: int | None = None) -> None:
        """Some chunks are prefilled and offered to the store, in vLLM's order: group by group."""
        stop = min(request.in_hbm + more, len(request.keys[0]))
        offered = [k for keys in request.keys.values() for k in keys[request.in_hbm : stop]]
        request.in_hbm = stop
        if not offered:
            return
        output: Any = self.manager.prepare_store(offered, request.context)
        assert [k for k in offered if k in output.keys_to_store] == output.keys_to_store
        assert len(output.store_spec.slots) == len(output.keys_to_store)
        if output.keys_to_store:
            self.send(request, output, lacking)

    def send(self, request: Request, output: Any, lacking: int | None) -> None:
        """To the workers; of the group `lacking`, if it stores any, a block is gone already."""
        by_group = {g.group_id: list[OffloadKey]() for g in self.shape.groups}
        for key in output.keys_to_store:
            by_group[get_offload_group_idx(key)].append(key)
        sizes = [
            len(keys) * BLOCKS - (g == lacking and len(keys) > 0) for g, keys in by_group.items()
        ]
        blocks = GPULoadStoreSpec(list(range(sum(sizes))), sizes, [0] * len(sizes))
        _, spec = self.manager.only_whole(blocks, output.store_spec)
        written = [k for g, keys in by_group.items() for k in keys if g != lacking]
        slots = dict(zip(written, spec.slots, strict=True))
        request.storing.append((output.keys_to_store, slots))

    @precondition(lambda self: self.running("storing"))
    @rule(data=st.data(), success=st.sampled_from([True, True, True, False]))
    def computed(self, data: Any, success: bool) -> None:
        request = data.draw(st.sampled_from(self.running("storing")))
        self.complete_store(request, data.draw(st.integers(0, len(request.storing) - 1)), success)

    def complete_store(self, request: Request, index: int, success: bool) -> None:
        """The workers wrote one of the stores under way, or one of them could not."""
        keys, slots = request.storing.pop(index)
        for key, slot in slots.items():
            written = bytes_of(key) if success else bytes(CHUNK_BYTES)
            self.slot(slot)[:] = np.frombuffer(written, np.uint8)
        if not success:
            self.manager.store_failed(set(keys), request.context.req_id)
        dropped = self.store.stats()["dropped_stores"]
        self.manager.complete_store(set(keys), request.context)
        if not success:
            assert self.store.stats()["dropped_stores"] >= dropped + len(slots)
        if success:
            self.stored.update(slots)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def preempt(self, data: Any) -> None:
        """Its HBM goes to others; it is asked for again later."""
        request = data.draw(st.sampled_from(self.free))
        request.in_hbm = 0
        self.manager.on_schedule_end(ScheduleEndContext([], [request.context.req_id]))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        """Or abort: at any time, also while transfers are under way."""
        request = data.draw(st.sampled_from(self.alive))
        request.ended = True
        self.manager.on_request_finished(request.context)

    @rule()
    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], []))
        self.manager.get_stats()
        list(self.manager.take_events())

    @rule()
    def settle(self) -> None:
        self.store.flush(timeout_s=30)

    @precondition(lambda self: self.number % 4 == 3)
    @rule()
    def reset(self) -> None:
        """The engine forgets its transfers, and the workers finish them before any new one."""
        self.manager.reset_cache()
        self.stored.clear()
        for request in self.requests:
            request.loading, request.storing, request.in_hbm = [], [], 0
            request.computes_all = False

    @invariant()
    def holds(self) -> None:
        self.store.check_integrity()
        for request in self.running("loading"):  # its workers read these slots now
            for key, slot in zip(request.loading, request.slots, strict=True):
                assert self.slot(slot).tobytes() == bytes_of(key)

    def end(self, request: Request) -> None:
        if not request.ended:
            request.ended = True
            self.manager.on_request_finished(request.context)
        if request.loading:
            self.manager.complete_load(set(request.loading), request.context)
        for keys, _ in request.storing:
            self.manager.complete_store(set(keys), request.context, success=False)
        request.loading, request.storing = [], []

    def slot(self, index: int) -> Any:
        return np.frombuffer(self.store._cold.arena.slot(index), dtype=np.uint8)[:CHUNK_BYTES]


class WindowEngine(Engine):
    """All layers have a window, of one chunk: hits are no prefix, and chunks stand alone."""

    windows = True

    def ask(self, request: Request, run: bool) -> bool:
        keys = request.keys[0]
        self.manager.ask(request.context.req_id, min(request.in_hbm, len(keys)) * TOKENS)
        for index in range(len(keys) - 1, request.in_hbm - 1, -1):
            result = self.manager.lookup(keys[index], request.context)
            if result is LookupResult.RETRY:
                return False
            if result is LookupResult.HIT:
                assert not request.computes_all
                assert keys[index] in self.stored
                if run:
                    self.load(request, [keys[index]])
                    request.in_hbm = index + 1
                return True
        return True


class HybridEngine(Engine):
    """A window group before the main one, and another behind it."""

    num_groups = 3
    dram_chunks = 12


def test_slots_are_those_of_the_chunks_asked_for_when_hbm_got_some_meanwhile() -> None:
    engine = Engine()
    engine.open()
    engine.serve(0, LENGTH)
    request = engine.receive(1, LENGTH)
    while not engine.ask(request, run=False):
        engine.store.flush(timeout_s=30)
    request.in_hbm = 1
    assert engine.ask(request, run=True)
    assert len(request.loading) >= 2
    engine.holds()
    engine.teardown()


def test_a_reset_frees_every_slot_and_pin() -> None:
    engine = Engine()
    engine.open()
    waiting, storing = engine.receive(0, LENGTH), engine.receive(7, 2)
    engine.offer(storing, 2)
    while not engine.ask(waiting, run=False):
        engine.store.flush(timeout_s=30)
    engine.reset()
    engine.store.flush(timeout_s=30)
    stats = engine.store.stats()
    assert (stats["dram"]["slots_used"], stats["open_loads"]) == (0, 0)
    assert engine.manager._lookups._ahead == 0
    engine.teardown()


def test_a_request_that_gave_up_waits_again_after_it_was_preempted() -> None:
    engine = Engine()
    engine.open()
    request = engine.receive(0, LENGTH)
    state = engine.manager._requests[request.context.req_id]
    state.gave_up = state.answered = True
    engine.manager.on_schedule_end(ScheduleEndContext([], [request.context.req_id]))
    assert not state.gave_up
    assert not state.answered
    engine.teardown()


def test_of_a_store_that_failed_nothing_is_kept_in_any_group() -> None:
    engine = HybridEngine()
    engine.open()
    engine.reset()  # for a store without a chunk
    request = engine.receive(0, 1)
    context, (first, main, last) = request.context, [keys[0] for keys in request.keys.values()]

    def admitted_by(*keys: OffloadKey, fails: bool) -> int:
        before = int(engine.store.stats()["admitted_chunks"])
        output: Any = engine.manager.prepare_store(keys, context)
        assert output.keys_to_store == [*keys]
        if fails:
            engine.manager.store_failed(set(keys), context.req_id)
        engine.manager.complete_store(set(keys), context)
        return int(engine.store.stats()["admitted_chunks"]) - before

    assert admitted_by(first, main, last, fails=True) == 0
    assert admitted_by(main, fails=False) == 1
    assert admitted_by(first, last, fails=True) == 0
    assert admitted_by(first, last, fails=False) == 2
    engine.teardown()


def test_a_request_that_ends_while_its_load_fails_is_forgotten_by_a_reset() -> None:
    engine = Engine()
    engine.open()
    request = engine.receive(0, 1)
    while not engine.ask(request, run=True):
        engine.store.flush(timeout_s=30)
    assert request.loading
    engine.manager.load_failed(request.context.req_id)
    request.ended = True
    engine.manager.on_request_finished(request.context)
    engine.reset()
    engine.teardown()


EFFORT = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestEngine = Engine.TestCase
TestEngine.settings = EFFORT
TestWindowEngine = WindowEngine.TestCase
TestWindowEngine.settings = EFFORT
TestHybridEngine = HybridEngine.TestCase
TestHybridEngine.settings = EFFORT
