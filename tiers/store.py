"""The store: the DRAM and NVMe tiers under one admission policy, for one namespace.

All of it runs on the caller's thread; nothing but the helpers under "Blocking" waits. A miss, a
refusal, a full tier, a dead disk and a corrupt chunk are results; only wrong arguments raise.
"""

import itertools
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch

from ..admission.base import Boundary, Key, Tier
from .arena import ArenaAddress
from .base import BesideJob, ChainJob, DirectLoad, Load, LoadState, Lookup, StoreJob
from .beside import Beside
from .chain import CheckedChain, check_keys
from .config import StoreConfig
from .direct_loading import DirectLoading
from .errors import StoreClosedError
from .events import ChunkEvent
from .forks import disown_in_children
from .io.base import Status
from .layout import Namespace
from .load_times import NOT_WORTH_LOADING
from .loading import NO_ROOM, Loading
from .nvme import ReadDone
from .opening import open_tiers
from .overview import check_integrity, snapshot, tell_all
from .storing import DRAM_IS_FULL, Storing
from .tensors import SlotTensors


class TieredStore:
    """Keeps chunks of KV by key in DRAM and on NVMe. Use it from one thread, or under a lock.

    `keys` is always a chain, head first, as chunk_keys() makes it; start is the index of the first
    chunk offered or wanted. A CheckedChain is checked once, when it is made, any other sequence at
    every call. Raises StoreClosedError after close(), and in a process forked from the one that
    opened it.
    """

    def __init__(self, config: StoreConfig, namespace: Namespace) -> None:
        self.namespace = namespace
        self.layout = namespace.layout
        self._timeout_s = config.load_timeout_s
        self._cold = open_tiers(config, namespace)
        self._loading = Loading(self._cold, config.load_timeout_s)
        self._direct = DirectLoading(self._cold)
        self._storing = Storing(self._cold)
        self._beside = Beside(self._cold)
        self._tensors = SlotTensors(self._cold.arena, self.layout)
        self._closed = False
        self._observed: frozenset[Key] = frozenset()  # the request that was told of last
        disown_in_children(self)

    # What is here ----------------------------------------------------------------------------

    def observe(self, keys: Sequence[Key], num_tokens: int | None = None) -> None:
        """A request with this chain arrived: admission learns from it, and the trace records it.
        Once per request; put() does it by itself, unless it follows for a chain just observed.

        num_tokens: of its prompt, where that ends within a chunk that has no key.
        """
        chain = self._chain(keys)
        self._observed = frozenset(chain)
        self._cold.learning.observe(chain, time.monotonic(), num_tokens)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine computed num_tokens of one prompt in `seconds`: loads that would take longer
        are cut from now on."""
        self._open_or_raise()
        self._cold.load_times.observe_prefill(num_tokens, seconds)

    def admits(self, boundary: Boundary, keys: Sequence[Key], start: int, free_chunks: int) -> int:
        """Up to which chunk admission lets keys[start:] cross a boundary of a tier that is the
        caller's, where free_chunks fit without evicting any."""
        chain = self._chain(keys)
        start = _checked_start(start, chain)
        return self._cold.offers.ask(boundary, chain, start, free_chunks).stop

    def lookup(self, keys: Sequence[Key], start: int = 0) -> Lookup:
        """The longest run from chunk `start` on that can be loaded now, and is worth it. Changes
        nothing; no system call."""
        chain = self._chain(keys)
        found = self._cold.run(chain, _checked_start(start, chain))
        tiers = found[: self._cold.load_times.promise(chain, start, found)]
        stop = start + len(tiers)
        num_tokens = len(tiers) * self.layout.chunk_tokens
        if tiers:  # only the last chunk of a chain may be partial
            num_tokens += self._cold.num_tokens(chain[stop - 1]) - self.layout.chunk_tokens
        cut = len(tiers) < len(found)
        why_not = NOT_WORTH_LOADING if cut else self._cold.why_ends(chain, stop)
        return Lookup(len(tiers), num_tokens, tuple(tiers), why_not)

    @property
    def arena_address(self) -> ArenaAddress:
        """Where other processes of this user find the DRAM slots, until close()."""
        self._open_or_raise()
        return self._cold.arena.shared_at

    # Loading ---------------------------------------------------------------------------------

    def prepare_load(self, keys: Sequence[Key], start: int = 0) -> Load:
        """Pin the run that begins at `start` and begin to read what of it is on NVMe.

        Call poll() until the load is READY, read its views, then complete_load(), always.
        """
        chain = self._chain(keys)
        return self._loading.prepare(chain, _checked_start(start, chain))

    def load_views(self, load: Load) -> list[torch.Tensor]:
        """One tensor per chunk of keys[load.start:load.stop], each a view of its DRAM slot, to be
        read only; valid until complete_load. The load must be READY."""
        if load.state is not LoadState.READY:
            raise ValueError(f"the load is {load.state.name}, must be READY: poll() until it is")
        chunks = load.chunks[: load.stop - load.start]
        assert all(chunk.readable for chunk in chunks), "a READY load holds an unread chunk"
        return [self._tensors.view(chunk.slot, chunk.num_tokens) for chunk in chunks]

    def complete_load(self, load: Load, used: bool = True) -> None:
        """Unpin. Admission decides which chunks that came from NVMe stay in DRAM.

        used: whether anybody read the views; a load that served nobody counts no hits.
        """
        self._open_or_raise()
        if load.state is LoadState.DONE:
            raise ValueError("complete_load was called twice for one load")
        self._loading.complete(load, used)

    def prepare_direct(self, keys: Sequence[Key], start: int, max_chunks: int) -> DirectLoad | None:
        """Lend the files of the first of keys[start:] that are on NVMe alone, up to max_chunks, for
        the caller to read and to verify. Then complete_direct(), always.

        None where admission would have any of them in DRAM, or they are not worth loading: like
        keys[start:load.start], which are in DRAM, those are for prepare_load().
        """
        chain = self._chain(keys)
        return self._direct.prepare(chain, _checked_start(start, chain), max_chunks)

    def complete_direct(
        self, load: DirectLoad, num_chunks: int, status: Status, *, used: bool = True
    ) -> None:
        """The files are the store's again. The first num_chunks of them were verified.

        status: how the one after those ended. Unless it is OK, which is to say that nobody cared,
        or UNAVAILABLE, that chunk is dropped. used: whether any served a request.
        """
        self._open_or_raise()
        self._direct.complete(load, num_chunks, status, used)

    # Storing ---------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Sequence[Key], start: int = 0, tail_tokens: int | None = None
    ) -> ChainJob:
        """Ask for slots for what of keys[start:] is not here yet. keys[:start] must be here.

        tail_tokens: tokens of the last chunk when it is a partial one. Fill the store_views(),
        then complete_store(), always.
        """
        chain = self._chain(keys)
        tail = self.layout.chunk_tokens if tail_tokens is None else tail_tokens
        if not 1 <= tail <= self.layout.chunk_tokens:
            allowed = f"1 to {self.layout.chunk_tokens}"
            raise ValueError(f"tail_tokens is {tail_tokens}, must be from {allowed}")
        return self._storing.prepare(chain, _checked_start(start, chain), tail)

    def prepare_beside(self, anchors: Sequence[Key], keys: Sequence[Key]) -> BesideJob:
        """Ask for slots for chunks that hang beside chunks of a chain: KV of other layers for the
        tokens of the chunk anchors[i], under a key of their own, a whole chunk's bytes each.

        Wanted is what is not here while its anchor is, or is being written. It goes where its
        anchor goes, goes before it, and is loaded as a chain of one, prepare_load([key]).
        Anchors may repeat. Fill the store_views(), then complete_store(), always.
        """
        names, hooks = self._chain(keys), tuple(anchors)
        check_keys("anchors", hooks)
        if len(hooks) != len(names):
            raise ValueError(f"{len(hooks)} anchors for {len(names)} keys, must be one for each")
        return self._beside.prepare(hooks, names)

    def store_views(self, job: StoreJob) -> list[torch.Tensor]:
        """One writable tensor per index in job.wanted, a view of the reserved slot; valid until
        complete_store."""
        if job.done:
            raise ValueError("the job is done; its views are no longer valid")
        return [self._tensors.view(chunk.slot, chunk.num_tokens) for chunk in job.chunks]

    def complete_store(self, job: StoreJob, success: bool = True) -> None:
        """The slots hold the KV (or, without success, never will): readable now, or forgotten."""
        self._open_or_raise()
        if job.done:
            raise ValueError("complete_store was called twice for one job")
        if isinstance(job, BesideJob):
            self._beside.complete(job, success)
        elif isinstance(job, ChainJob):
            self._storing.complete(job, success)

    def invalidate(self, successor: Namespace | None = None) -> None:
        """Everything stored so far becomes unreachable, in this process and after a restart.

        successor: another namespace of the same layout for what is stored from now on, which is
        then of use to this process alone: the next one to open the directory finds none of it.
        Loads in progress end empty; stores in progress are forgotten when they complete. Waits for
        the disk to remember it; raises TierError when that fails.
        """
        self._open_or_raise()
        successor = successor or self.namespace
        if successor.layout != self.layout:
            raise ValueError(f"successor has layout {successor.layout}, must be {self.layout}")
        self.namespace = successor
        cold = self._cold
        self._loading.cut_all("the namespace was invalidated")
        self._direct.cut_all()
        here = [chunk.key for chunk in cold.dram]
        cold.why_not.change_namespace(itertools.chain(here, cold.nvme.readable_keys()))
        cold.dram.clear(cold.policy.order(Tier.DRAM))
        cold.nvme.invalidate(cold.policy.order(Tier.NVME), successor.digest)

    def poll(self) -> None:
        """Apply what the IO side reported, cut late loads, send the next writes down."""
        self._open_or_raise()
        for event in self._cold.nvme.poll():
            if isinstance(event, ReadDone):
                self._loading.apply(event)
            else:
                self._cold.flusher.apply(event)
        self._loading.expire()
        self._cold.learning.save_if_due(time.monotonic())
        self._cold.flusher.run()
        self._cold.cleaner.poll()
        self._cold.nvme.submit()

    # Blocking --------------------------------------------------------------------------------

    def put(self, keys: Sequence[Key], tensors: Sequence[torch.Tensor], start: int = 0) -> int:
        """Offer tensors as the chunks keys[start:]; returns how many of them the store now holds.

        A tensor is (num_layers, kv_factor, tokens, num_kv_heads, head_dim) of the layout's dtype;
        only the last may have fewer tokens than a chunk. Waits for room when DRAM is full of
        chunks on their way to NVMe, up to the load timeout.
        """
        chain, offered = self._chain(keys), list(tensors)
        self._tensors.check(offered)
        if _checked_start(start, chain) + len(offered) > len(chain):
            raise ValueError(f"{len(offered)} tensors from chunk {start} on, but {len(chain)} keys")
        chain = chain.head(start + len(offered))
        tail_tokens = offered[-1].shape[2] if offered else None
        if not self._observed.issuperset(chain[-1:]):
            self.observe(chain)
        self._observed = frozenset()
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            job = self.prepare_store(chain, start, tail_tokens)
            pending = self._cold.flusher.pending
            for index, view in zip(job.wanted, self.store_views(job), strict=True):
                view.copy_(offered[index - start])
            self.complete_store(job)
            if job.why_not != DRAM_IS_FULL:
                return max(0, job.stop - start)
            if not job.wanted and not self._wait_for_room(pending, deadline_s):
                return max(0, job.stop - start)

    def get(self, keys: Sequence[Key], start: int = 0) -> list[torch.Tensor]:
        """Copies of the leading chunks of keys[start:] that are here and verified, maybe none.

        Waits for room when DRAM is full of chunks on their way to NVMe, up to the load timeout.
        """
        chain = self._chain(keys)
        found: list[torch.Tensor] = []
        deadline_s = time.monotonic() + self._timeout_s
        while True:  # DRAM may be too small to hold the whole run at once
            load = self.prepare_load(chain, start + len(found))
            pending = self._cold.flusher.pending
            self.wait_load(load)
            views = self.load_views(load)
            found += [view.clone() for view in views]
            self.complete_load(load)
            if start + len(found) == len(chain):
                return found
            if load.why_not != NO_ROOM:
                return found
            if not views and not self._wait_for_room(pending, deadline_s):
                return found

    def wait_load(self, load: Load) -> None:
        """Poll until the load is READY; its deadline bounds the wait."""
        self.poll()
        while load.state is LoadState.PENDING:
            self._cold.nvme.wait(0.01)
            self.poll()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until every chunk that admission lets onto NVMe is there; what it refuses stays in
        DRAM until evicted. False when that took too long."""
        cold, passed, deadline_s = self._cold, set[Key](), time.monotonic() + timeout_s
        self.poll()
        while (
            not cold.cleaner.decide_all(passed) or cold.flusher.pending or cold.nvme.jobs_in_flight
        ):
            if time.monotonic() > deadline_s:
                return False
            cold.nvme.submit()
            cold.nvme.wait(0.01)
            self.poll()
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        """Write down what is admitted, commit the index, release everything. Idempotent."""
        if self._closed:
            return
        try:
            self.flush(timeout_s)
        finally:
            self._closed = True
            self._direct.close()
            self._cold.release.close()

    def disown(self) -> None:
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # For whoever watches ---------------------------------------------------------------------

    def record_events(self, max_events: int = 65_536) -> None:
        """Start to record what comes and goes, beginning with what is here now.

        A taker who falls behind by max_events misses arrivals, and the departures of those; it
        never believes in a chunk that is gone.
        """
        self._open_or_raise()
        self._cold.events.start(max_events)
        tell_all(self._cold)

    def take_events(self) -> list[ChunkEvent]:
        """What came and went since the last call, oldest first; nothing before record_events().

        A chunk is in DRAM once its store, or its promotion, is complete, and on NVMe once its
        write is done.
        """
        return self._cold.events.take()

    # For people and tests --------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Chunks that DRAM has room for, once all of it is populated."""
        return self._cold.arena.num_slots

    @property
    def busy(self) -> bool:
        """Whether poll() has something to do or to wait for: reads or writes that are under way or
        due, or what DRAM holds to be decided ahead of its eviction."""
        cold = self._cold
        return bool(cold.flusher.pending or cold.nvme.jobs_in_flight or cold.cleaner.due)

    def stats(self) -> dict[str, Any]:
        """Counters since opening and gauges of now, as plain numbers and dicts."""
        return snapshot(self._cold, open_loads=len(self._loading) + len(self._direct))

    def check_integrity(self) -> None:
        """Raise AssertionError if any invariant is broken."""
        check_integrity(self._cold)

    def _wait_for_room(self, pending: int, deadline_s: float) -> bool:
        """Whether, before the deadline, one of `pending` writes that hold a slot ended, or the
        arena, still being populated, grew."""
        cold = self._cold
        slots = cold.arena.touched_slots
        while True:
            self.poll()
            if cold.flusher.pending < pending or cold.arena.touched_slots > slots:
                return True
            if time.monotonic() > deadline_s or not (pending or cold.arena.growing):
                return False
            if cold.arena.growing:
                cold.arena.wait_touched(slots + 1, 0.01)
            else:
                cold.nvme.wait(0.01)

    def _chain(self, keys: Sequence[Key]) -> CheckedChain:
        self._open_or_raise()
        return keys if type(keys) is CheckedChain else CheckedChain(keys)

    def _open_or_raise(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")


def _checked_start(start: int, chain: CheckedChain) -> int:
    if type(start) is not int or not 0 <= start <= len(chain):
        raise ValueError(f"start is {start!r}, must be a chunk index from 0 to {len(chain)}")
    return start
