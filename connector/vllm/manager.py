"""The scheduler's side: which chunks vLLM may load and store, answered from one TieredStore.

All of it runs on the scheduler's thread and nothing waits. Chunks of the main group (the first
with full attention) are chains to the store; chunks of other groups hang beside them.
"""

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ...tiers.base import Key, StoreJob, Tier
from ...tiers.errors import TierError
from ...tiers.store import TieredStore
from .adapters import Adapters
from .events import Events
from .lookups import Lookups
from .metrics import Metrics
from .names import ChunkNames, Names, SaltedNames
from .partial import fills_chunks, keep_groups, whole_groups
from .placing import Placed, place
from .requests import RequestState, Storing
from .shape import Shape
from .slots import SlotSpec

log = logging.getLogger(__name__)


class Manager(OffloadingManager):
    """The spec makes it; the connector, which knows the engine's configuration, opens it."""

    def open(self, store: TieredStore, shape: Shape, *, timeout_s: float, events: bool) -> None:
        """store is the manager's own from now on; events: whether vLLM publishes KV events."""
        self.store = store
        self._shape = shape
        self._names = ChunkNames(store.namespace.digest)
        self._arena = store.arena_address
        self._requests: dict[str, RequestState] = {}
        self._computes_all: set[str] = set()
        """Requests of which a load failed: asked again, the answer must not be that load again."""
        self._lookups = Lookups(store, shape, timeout_s)
        self._metrics = Metrics(store, self._lookups)
        self._events = Events(store, events)
        self._adapters = Adapters()
        self.when_reset: Callable[[], object] = lambda: None
        """Called when all is gone, before vLLM forgets what there was."""

    # A request's life ------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def arrived(self, req_id: str, block_hashes: Sequence[bytes], lora_request: Any = None) -> None:
        """The connector tells what vLLM's manager is not told: the hashes of the whole prefix, in
        the engine's own list, which grows with the request, and the adapter."""
        names: Names = self._names
        if lora_request is not None:
            names = SaltedNames(names, self._adapters.salt(lora_request))
        self._requests[req_id] = RequestState(names, block_hashes)
        self.store.observe(self._extended(req_id).chain)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for req_id in context.preempted_req_ids:
            if req_id in self._requests:
                self._requests[req_id].ask_afresh()
        self.store.poll()

    def on_request_finished(self, req_context: ReqContext) -> None:
        state = self._requests.get(req_context.req_id)
        if state is not None:
            self._lookups.release(state)
            state.finished = True
            self._forget_if_done(req_context.req_id, state)

    # Lookup ----------------------------------------------------------------------------------

    def ask(self, req_id: str, num_computed_tokens: int) -> None:
        """The scheduler considers this request: find out what of its prefix can be had."""
        state = self._extended(req_id)
        if req_id in self._computes_all:
            self._lookups.common, self._lookups.num_hits = LookupResult.MISS, 0
        else:
            self._lookups.ask(state, num_computed_tokens // self._shape.chunk_tokens)

    def runs(self, req_id: str) -> None:
        """It has its place in HBM, and took what it wanted."""
        self._lookups.release(self._requests[req_id])

    @property
    def num_hits(self) -> int:
        """Chunks of the main group that the request asked for last would load."""
        return self._lookups.num_hits

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._lookups.common or self._lookups.answer(key)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        tier = self._lookups.source(self._requests[req_context.req_id].names.key(key))
        return CacheHitSource.DISK if tier is Tier.NVME else CacheHitSource.HOST

    # Load ------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        state = self._extended(req_context.req_id)
        state.load_began_s = time.monotonic()
        wanted = list(keys)
        placed = place(self._shape, state, wanted, req_context)
        loads = self._lookups.take(state, placed.main, placed.others)
        self._events.name(placed.keys, wanted)
        if not placed.beside:
            first, stop = placed.main.start - loads[0].start, placed.main.stop - loads[0].start
            return SlotSpec(self._arena, tuple([c.slot for c in loads[0].chunks[first:stop]]))
        slots = dict[Key, int]()
        for load in loads:
            here = [chunk.slot for chunk in load.chunks[: load.stop - load.start]]
            slots.update(zip(load.keys[load.start : load.stop], here, strict=True))
        return SlotSpec(self._arena, tuple([slots[key] for key in placed.keys]))

    def load_failed(self, req_id: str) -> None:
        """Workers could not fill the pages. The chunks are whole and stay, pinned until all have
        told of the load and it is completed."""
        self._computes_all.add(req_id)
        loads = self._requests[req_id].loads
        self._lookups.missed_chunks += sum(load.stop - load.start for load in loads)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        state = self._requests[req_context.req_id]
        loads, state.loads = state.loads, []
        for load in loads:
            self.store.complete_load(load, used=req_context.req_id not in self._computes_all)
        self._metrics.loaded(time.monotonic() - state.load_began_s)
        self._forget_if_done(req_context.req_id, state)

    # Store -----------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        state, offered = self._extended(req_context.req_id), list(keys)
        if state.outlived_reset:
            return PrepareStoreOutput([], SlotSpec(self._arena, ()), evicted_keys=[])
        placed = place(self._shape, state, offered, req_context)
        jobs = self._offer(state, placed)
        slots: dict[Key, int] = {}
        for _, job in jobs:
            taken = [chunk.slot for chunk in job.chunks]
            slots.update(zip([job.keys[i] for i in job.wanted], taken, strict=True))
        ours = [key for key in placed.keys if key in slots]
        wanted = [name for name, key in zip(offered, placed.keys, strict=True) if key in slots]
        spec = SlotSpec(self._arena, tuple([slots[key] for key in ours]))
        storing = Storing(jobs, set(wanted), spec, time.monotonic())
        if wanted:
            state.storing.append(storing)
            self._events.name(ours, wanted)
        else:
            self._complete(storing, success=True)
        return PrepareStoreOutput(wanted, spec, evicted_keys=[])

    def only_whole(
        self, blocks: GPULoadStoreSpec, slots: SlotSpec
    ) -> tuple[GPULoadStoreSpec, SlotSpec]:
        """A store as vLLM is about to send it to the workers, without groups that lack blocks;
        their chunks are forgotten when it completes."""
        if fills_chunks(blocks, slots, self._shape.blocks_per_chunk):
            return blocks, slots
        storing = next(s for s in self._stores() if s.slots is slots)
        groups = [group.group_id for group in self._shape.groups]
        chunks = [sum(len(job.wanted) for g, job in storing.jobs if g == group) for group in groups]
        keep = whole_groups(blocks, chunks, self._shape.blocks_per_chunk)
        storing.failed.update(g for g, kept in zip(groups, keep, strict=True) if not kept)
        return keep_groups(blocks, slots, chunks, keep)

    def store_failed(self, keys: Collection[OffloadKey], req_id: str) -> None:
        """Workers could not fill the slots: the chunks are forgotten when all have told of the
        store and it is completed."""
        storing = self._storing(keys, req_id)
        storing.failed.update(group for group, _ in storing.jobs)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        state = self._requests[req_context.req_id]
        storing = self._storing(keys, req_context.req_id)
        state.storing.remove(storing)
        self._complete(storing, success)
        self._metrics.stored(time.monotonic() - storing.began_s)
        self._forget_if_done(req_context.req_id, state)

    # The engine as a whole -------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Everything becomes unreachable: the engine's weights may have changed in place.

        What is stored from now on is not for an engine that starts with the weights on disk, so
        it goes to a namespace that no later start has.
        """
        # vLLM orders every worker to finish its transfers before any new one, and NVMe holds
        # nothing that could be read into their slots until something was stored anew.
        for storing in self._stores():
            self._complete(storing, success=False)
        for state in self._requests.values():
            self._lookups.release(state)
            state.ask_afresh()
            for load in state.loads:
                self.store.complete_load(load, used=False)
            state.loads.clear()
            state.storing.clear()
            # It may hold KV of before, and vLLM offers it all again, dropped windows included.
            state.outlived_reset = True
        self._requests = {i: s for i, s in self._requests.items() if not s.finished}
        self._computes_all.clear()
        self._lookups.forget()
        now = self.store.namespace
        try:
            self.store.invalidate(replace(now, extra={**now.extra, "reset": uuid.uuid4().hex}))
        except TierError as error:
            log.error("KV that nobody may use is still on the disk: %s", error)
        self.when_reset()

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._events.take()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._metrics.take()

    def has_pending_work(self) -> bool:
        """Whether vLLM must go on stepping although no request runs: writes are under way, or
        numbers are not told yet."""
        return self.store.busy or self._metrics.due

    def shutdown(self) -> None:
        self.store.close()

    def _extended(self, req_id: str) -> RequestState:
        state = self._requests[req_id]
        state.extend(self._shape.main.group_id, self._shape.hashes_per_chunk)
        return state

    def _offer(self, state: RequestState, placed: Placed) -> list[tuple[int, StoreJob]]:
        """Our jobs by group; without a chain, every chunk is one of its own."""
        jobs: list[tuple[int, StoreJob]] = []
        if placed.main:
            chain = state.chain.head(placed.main.stop)
            job = self.store.prepare_store(chain, placed.main.start)
            jobs.append((self._shape.main.group_id, job))
        for group_id, hanging in placed.beside.items():
            if self._shape.has_chain:
                beside = self.store.prepare_beside(list(hanging.values()), list(hanging))
                jobs.append((group_id, beside))
            else:
                jobs += [(group_id, self.store.prepare_store([key])) for key in hanging]
        return jobs

    def _storing(self, keys: Collection[OffloadKey], req_id: str) -> Storing:
        return next(s for s in self._requests[req_id].storing if s.keys == keys)

    def _stores(self) -> list[Storing]:
        """All that are under way."""
        return [storing for state in self._requests.values() for storing in state.storing]

    def _complete(self, storing: Storing, success: bool) -> None:
        for group_id, job in storing.jobs:
            self.store.complete_store(job, success and group_id not in storing.failed)

    def _forget_if_done(self, req_id: str, state: RequestState) -> None:
        if state.finished and not state.loads and not state.storing:
            self._requests.pop(req_id, None)
            self._computes_all.discard(req_id)
