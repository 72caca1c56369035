"""What of a request's prefix can be had from the cold tiers, and the reads that bring it up.

A chunk in DRAM is a hit. Chunks on NVMe are read for a request that could run soon, pinned for it,
and are hits once they are in. A request waits at most the load timeout for its turn to read and as
long for the read itself; then vLLM recomputes what is missing.
"""

import time
from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import LookupResult

from ...tiers.base import Key, Load, LoadState, Tier
from ...tiers.store import TieredStore
from .requests import RequestState
from .shape import Shape

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


class Lookups:
    """Answers for one request at a time: ask() first, then answer() for any of its chunks.

    Requests whose chunks exceed the engine's own cache together cannot run soon, so no more than
    that is read ahead of them; nor more than half of DRAM, so that stores find room.

    With several groups, one answer may stage a chunk after another was given, so there hits are
    pinned until the request takes them.
    """

    def __init__(self, store: TieredStore, shape: Shape, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._has_chain = shape.has_chain
        self._one_chain = shape.is_one_chain
        self._most_ahead = max(1, min(store.num_slots // 2, shape.hbm_chunks))
        self._ahead = 0  # chunks pinned for requests that do not run yet
        self._state: RequestState | None = None
        self._answers: dict[Key, LookupResult] = {}
        self.common: LookupResult | None = None
        """The answer that all chunks have which may be asked for, if they have one."""
        self._taken: list[Load] = []
        self._sources: dict[Key, Tier] | None = None  # of _taken, once asked for
        self.missed_chunks = 0
        """Counted once per request, and again when it was preempted."""
        self.num_hits = 0
        """Chunks of the main group that were answered HIT."""

    def ask(self, state: RequestState, start: int) -> None:
        """Work out the answers for the main group's chunks from `start` on."""
        self._state, self._answers, self.common = state, {}, None
        if not self._has_chain:
            self.num_hits = len(state.chain) - start  # at most; each is looked up by itself
            return
        hits, waits = self._run(state, start)
        self.num_hits = hits - start
        if hits == waits and not state.answered:
            state.answered = True
            self.missed_chunks += len(state.chain) - hits
        if self._one_chain and waits == start:
            self.common = MISS
        elif self._one_chain and hits == len(state.chain):
            self.common = HIT
        else:
            answers = dict.fromkeys(state.chain[start:], MISS)
            answers.update(dict.fromkeys(state.chain[start:hits], HIT))
            answers.update(dict.fromkeys(state.chain[hits:waits], RETRY))
            self._answers = answers

    def answer(self, offload_key: bytes) -> LookupResult:
        state = self._state
        assert state is not None, "vLLM looks a chunk up before it asked for the request"
        key = state.names.key(offload_key)
        return self._answers.get(key) or self._beside(state, key)

    def take(self, state: RequestState, main: range, beside: Iterable[Key]) -> list[Load]:
        """READY loads of chunks that were answered HIT, the main group's first; state.loads pins
        them from now on.

        main: indices into the request's chain.
        """
        loads = [self._take_main(state, main)] if main else []
        loads += [self._take_beside(state, key) for key in beside]
        assert all(load.state is LoadState.READY for load in loads), "a HIT is not in DRAM"
        self._ahead -= sum(len(load.chunks) for load in loads)
        self.release(state)
        state.asked_s, state.gave_up = None, False
        state.loads += loads
        self._taken, self._sources = loads, None
        return loads

    def source(self, key: Key) -> Tier | None:
        """The tier that had a chunk of the request which took any last."""
        if self._sources is None:
            self._sources = {}
            for load in self._taken:
                self._sources.update(zip(load.keys[load.start :], load.tiers, strict=False))
        return self._sources.get(key)

    def release(self, state: RequestState) -> None:
        """Unpin what was read for the request and not taken."""
        for load in state.waiting():
            self._ahead -= len(load.chunks)
            self._store.complete_load(load, used=False)
        state.prefetch = None
        state.beside.clear()

    def forget(self) -> None:
        """No answer holds any more."""
        self._answers, self.common = {}, None
        self._taken, self._sources = [], None

    # The main group --------------------------------------------------------------------------

    def _run(self, state: RequestState, start: int) -> tuple[int, int]:
        """(hits, waits): chain[start:hits] can be loaded, chain[hits:waits] is to be waited for.

        One chunk to wait for makes vLLM ask for the request again, and ends its loop over them.
        """
        load = state.prefetch
        if load is not None and not load.start <= start < load.stop:
            self.release(state)
            load = None
        if load is None:
            waited = state.asked_s is not None
            if waited and not self._may_read(state, 1) and not state.gave_up:
                return start, start + 1  # as before: a long queue costs little at each step
            tiers = self._store.lookup(state.chain, start).tiers
            stop = start + len(tiers)
            if Tier.NVME in tiers:
                if self._may_read(state, len(tiers)):
                    stop = min(stop, start + self._most_ahead)
                elif not state.gave_up:
                    return start, start + 1
                else:
                    stop = start + tiers.index(Tier.NVME)
            if stop == start or (self._one_chain and Tier.NVME not in tiers[: stop - start]):
                return stop, stop
            load = state.prefetch = self._load(state.chain.head(stop), start)
        if load.state is LoadState.PENDING:
            return start, start + 1
        if load.stop < len(load.keys):
            state.gave_up = True
        return max(start, load.stop), max(start, load.stop)

    def _take_main(self, state: RequestState, main: range) -> Load:
        load = state.prefetch
        if load is None or main.start < load.start or load.stop < main.stop:
            return self._load(state.chain.head(main.stop), main.start)
        state.prefetch = None
        return load

    # Other groups ----------------------------------------------------------------------------

    def _beside(self, state: RequestState, key: Key) -> LookupResult:
        load = state.beside.get(key)
        if load is None:
            tiers = self._store.lookup([key]).tiers
            if not tiers:
                return MISS
            # A request whose turn it is reads all it needs: it must not wait for itself.
            turn = bool(state.waiting()) or tiers[0] is Tier.DRAM or self._may_read(state, 1)
            if not turn:
                return MISS if state.gave_up else RETRY
            load = state.beside[key] = self._load([key], 0)
        if load.state is LoadState.PENDING:
            return RETRY
        return HIT if load.stop else MISS

    def _take_beside(self, state: RequestState, key: Key) -> Load:
        return state.beside.pop(key) if key in state.beside else self._load([key], 0)

    # Both ------------------------------------------------------------------------------------

    def _load(self, keys: Sequence[Key], start: int) -> Load:
        load = self._store.prepare_load(keys, start)
        self._ahead += len(load.chunks)
        return load

    def _may_read(self, state: RequestState, num_chunks: int) -> bool:
        """Whether it is this request's turn; gives up when that does not come in time."""
        if not state.gave_up and (self._ahead == 0 or self._ahead + num_chunks <= self._most_ahead):
            return True
        now_s = time.monotonic()
        state.asked_s = state.asked_s or now_s
        state.gave_up = state.gave_up or now_s - state.asked_s > self._timeout_s
        return False
