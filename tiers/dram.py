"""The DRAM tier: which chunk lives in which slot of the arena, and what may be done with it.

A slot's life:

    free -> WRITING (an engine fills it) -> UNDECIDED -> DIRTY -> FLUSHING -> CLEAN -> free
         -> READING (the IO side fills it) -> CLEAN  \\-> UNBACKED -> free

Readers pin a chunk; one that is pinned, unwritten, or whose write to NVMe is to be decided or under
way is never evicted.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile

from ..admission.base import Chain, EvictionOrder, Key, Tier
from .arena import SharedArena
from .base import WriteDown
from .events import EventLog
from .history import WhyNot
from .metrics import Metrics


class ChunkState(IntEnum):
    WRITING = 0
    READING = 1
    UNDECIDED = 2
    """Readable; NVMe does not have it, and nobody decided yet whether it shall."""
    DIRTY = 3
    """Readable; waits for its write to NVMe."""
    FLUSHING = 4
    """Readable; the IO side reads its slot."""
    CLEAN = 5
    """Readable; NVMe has it too, so evicting it costs nothing."""
    UNBACKED = 6
    """Readable; NVMe does not have it and will not, so evicting it forgets it."""


_EVICTABLE = (ChunkState.CLEAN, ChunkState.UNBACKED)


@dataclass(slots=True, eq=False)
class DramChunk:
    """One occupied slot. The tier owns every field; others read them."""

    key: Key
    parent: Key | None
    slot: int
    num_tokens: int
    state: ChunkState
    pins: int = 0
    readable: bool = False
    """The slot holds the chunk's bytes: false while it is WRITING or READING."""
    staged: bool = False
    """Here only for the loads that pin it: not admitted, in no eviction order."""
    detached: bool = False
    """No longer to be found by its key; the slot is free once nobody uses it."""
    promoted: bool = False
    """It stayed after a load that read it from NVMe, and served none since."""
    beside: bool = False
    """It hangs beside a chunk of a chain, its parent, and is not of the chain itself."""

    @property
    def listed(self) -> bool:
        """Whether it is in the eviction order."""
        return not self.staged and not self.detached

    @property
    def in_use(self) -> bool:
        """Whether an engine, a reader or the IO side touches the slot's bytes."""
        return self.pins > 0 or not self.readable or self.state is ChunkState.FLUSHING


class DramTier:
    """Keys to slots. Every method is for the engine's thread and does no IO.

    write_down: "late" when somebody decides on what is only here before it is evicted, and again
    when it was used since.
    """

    def __init__(
        self,
        arena: SharedArena,
        order: EvictionOrder,
        why_not: WhyNot,
        metrics: Metrics,
        events: EventLog,
        write_down: WriteDown = "eager",
    ) -> None:
        self.num_pinned = 0
        """Slots with at least one pin."""
        self._late = write_down == "late"
        self.unwritten = ChunkState.UNDECIDED if self._late else ChunkState.UNBACKED
        """What a readable chunk is that NVMe does not have."""
        self._arena = arena
        self._order = order
        self._why_not = why_not
        self._metrics = metrics
        self._events = events
        self._chunks: dict[Key, DramChunk] = {}
        self._readable: dict[Key, DramChunk] = {}  # those of _chunks whose bytes are here
        self._by_slot: list[DramChunk | None] = [None] * arena.num_slots
        self._freed: list[int] = []
        self._next_fresh = 0  # slots from here on were never used
        self._nothing_to_evict = False  # until a chunk is done with
        self._num_listed = [0] * len(ChunkState)  # by state; of those from UNDECIDED on
        self._worthless: set[Key] = set()  # UNBACKED, when that can be decided again

    # What is here ----------------------------------------------------------------------------

    def get(self, key: Key) -> DramChunk | None:
        return self._chunks.get(key)

    def num_readable(self, keys: Sequence[Key]) -> int:
        """Of how many leading keys the bytes are here."""
        return len(list(takewhile(bool, map(self._readable.get, keys))))

    def find(self, keys: Sequence[Key]) -> Iterator[DramChunk | None]:
        """get() of each, when it is asked for."""
        return map(self._chunks.get, keys)

    def at(self, slot: int) -> DramChunk:
        chunk = self._by_slot[slot]
        assert chunk is not None, f"slot {slot} is free"
        return chunk

    def anchors(self, key: Key) -> bool:
        """Whether chunks here hang from `key` while it is not here itself: NVMe must keep it."""
        return self._order.has_child(key) and key not in self._chunks

    def __len__(self) -> int:
        """Slots in use, detached and staged ones too."""
        return self._next_fresh - len(self._freed)

    def __iter__(self) -> Iterator[DramChunk]:
        """Chunks that can be found by their key."""
        return iter(self._chunks.values())

    @property
    def unused_slots(self) -> int:
        """Slots without a chunk, those of memory that is still being touched too."""
        arena = self._arena
        return (arena.num_slots if arena.growing else arena.touched_slots) - len(self)

    @property
    def ready_slots(self) -> int:
        """Slots that are free, or that an eviction frees at once or when a write is done."""
        return self.unused_slots + sum(self._num_listed[ChunkState.DIRTY :])

    @property
    def num_undecided(self) -> int:
        return self._num_listed[ChunkState.UNDECIDED]

    @property
    def num_evictable(self) -> int:
        """Chunks that could be evicted if no reader pinned them and nothing hung from them."""
        return sum(self._num_listed[state] for state in _EVICTABLE)

    def touch(self, chain: Chain, stop: int) -> None:
        """A request used chain[:stop]: what NVMe refused of it is undecided again."""
        self._order.touch(chain, stop)
        if self._worthless:
            for key in self._worthless.intersection(chain[:stop]):
                self._become(self._chunks[key], ChunkState.UNDECIDED)

    # Coming ----------------------------------------------------------------------------------

    def reserve(
        self,
        key: Key,
        parent: Key | None,
        num_tokens: int,
        state: ChunkState,
        worth: float | None = None,
    ) -> DramChunk | None:
        """A slot for `key`, evicting if need be; None when everything is in use, or, with a worth,
        worth as much.

        A READING chunk is staged: it joins the eviction order when it is admitted.
        """
        assert key not in self._chunks
        slot = self._take_slot(worth)
        if slot is None:
            return None
        chunk = DramChunk(key, parent, slot, num_tokens, state)
        self._chunks[key] = chunk
        self._by_slot[slot] = chunk
        if state is ChunkState.READING:
            chunk.staged = True
        else:
            self._order.add(key, parent)
        return chunk

    def admit(self, chunk: DramChunk) -> None:
        """A staged chunk stays after its loads are done."""
        if chunk.staged and not chunk.detached:
            assert chunk.readable
            chunk.staged = False
            chunk.promoted = True
            self._num_listed[chunk.state] += 1
            self._order.add(chunk.key, chunk.parent)
            self._events.stored(Tier.DRAM, chunk.key)
            self._nothing_to_evict = False

    def settle(self, chunk: DramChunk, state: ChunkState) -> None:
        """Nobody touches the slot's bytes any more, save readers; they are the chunk's, or it is
        detached."""
        if chunk.state is ChunkState.WRITING and not chunk.detached:
            self._events.stored(Tier.DRAM, chunk.key)
        self._become(chunk, state)
        chunk.readable = True
        if not chunk.detached:
            self._readable[chunk.key] = chunk
        self._free_if_done(chunk)

    def candidate(self, but: Container[Key]) -> DramChunk | None:
        """The next chunk to be evicted among those UNDECIDED, not pinned and not in `but`."""
        chunks = self._chunks

        def passed_over(key: Key) -> bool:
            chunk = chunks[key]
            return chunk.state is not ChunkState.UNDECIDED or chunk.pins > 0 or key in but

        key = self._order.victim(passed_over) if self.num_undecided else None
        return None if key is None else chunks[key]

    def undecided(self) -> list[DramChunk]:
        """All of them, those reserved last first."""
        undecided = ChunkState.UNDECIDED
        if not self.num_undecided:
            return []
        return [c for c in reversed(self._chunks.values()) if c.listed and c.state is undecided]

    def queue(self, chunk: DramChunk) -> None:
        """It is to be written to NVMe."""
        assert chunk.state in (ChunkState.UNDECIDED, ChunkState.UNBACKED)
        self._become(chunk, ChunkState.DIRTY)

    def flushing(self, chunk: DramChunk) -> None:
        """The IO side reads its slot from now on, until settle()."""
        self._become(chunk, ChunkState.FLUSHING)

    def unback(self, key: Key, state: ChunkState) -> bool:
        """NVMe no longer has `key`, which is `state` now if it is here; whether it is.

        A staged chunk still serves the loads that pin it, but is not to be found any more.
        """
        chunk = self._chunks.get(key)
        if chunk is None or chunk.staged:
            if chunk is not None:
                self.detach(chunk)
            return False
        if chunk.state is ChunkState.CLEAN:
            self._become(chunk, state)
        return True

    # Readers ---------------------------------------------------------------------------------

    def pin(self, *chunks: DramChunk) -> None:
        for chunk in chunks:
            if not chunk.pins:
                self.num_pinned += 1
            chunk.pins += 1

    def unpin(self, *chunks: DramChunk) -> None:
        for chunk in chunks:
            assert chunk.pins > 0, "unpinned more often than pinned"
            chunk.pins -= 1
            if not chunk.pins:
                self.num_pinned -= 1
                if chunk.staged or chunk.detached:
                    self._free_if_done(chunk)
        self._nothing_to_evict = False

    # Going -----------------------------------------------------------------------------------

    def detach(self, chunk: DramChunk) -> None:
        """Make a chunk unreachable now; its slot comes free when nobody uses it any more."""
        if chunk.detached:
            return
        listed = chunk.readable and not chunk.staged
        if listed:
            self._num_listed[chunk.state] -= 1
            if self._worthless:
                self._worthless.discard(chunk.key)
        chunk.detached = True
        del self._chunks[chunk.key]
        self._readable.pop(chunk.key, None)
        self._order.discard(chunk.key)
        if listed:
            self._events.removed(Tier.DRAM, chunk.key)
        self._metrics.wasted_promotions += chunk.promoted
        self._nothing_to_evict = False
        self._free_if_done(chunk)

    def detach_below(self, key: Key) -> None:
        """Detach every chunk here whose chain runs through `key`."""
        for below in self._order.descendants(key):
            self.detach(self._chunks[below])

    def clear(self, order: EvictionOrder) -> None:
        """Make everything unreachable; `order` starts empty in place of the old one."""
        for chunk in list(self._chunks.values()):
            self.detach(chunk)
        self._order = order

    def check_integrity(self) -> None:
        self._order.check_integrity()
        used = [chunk for chunk in self._by_slot if chunk is not None]
        assert len(used) == len(self)
        assert sorted(self._freed + [c.slot for c in used]) == list(range(self._next_fresh))
        for chunk in used:
            assert self._by_slot[chunk.slot] is chunk
            assert chunk.detached or self._chunks[chunk.key] is chunk
            assert not chunk.detached or chunk.in_use, "a detached chunk nobody uses holds a slot"
            assert not chunk.staged or chunk.in_use, "a staged chunk nobody uses holds a slot"
            in_order = chunk.key in self._order and self._chunks.get(chunk.key) is chunk
            assert in_order == chunk.listed
            assert chunk.readable == (chunk.state >= ChunkState.UNDECIDED)
        assert self.num_pinned == sum(chunk.pins > 0 for chunk in used)
        listed = [chunk for chunk in used if chunk.listed and chunk.readable]
        states = [chunk.state for chunk in listed]
        assert self._num_listed == [states.count(state) for state in ChunkState]
        unbacked = {chunk.key for chunk in listed if chunk.state is ChunkState.UNBACKED}
        assert self._worthless == (unbacked if self._late else set())
        readable = {key: chunk for key, chunk in self._chunks.items() if chunk.readable}
        assert self._readable == readable
        assert len(self._chunks) == sum(not chunk.detached for chunk in used)

    def _take_slot(self, worth: float | None) -> int | None:
        freed = self._freed
        if freed:
            return freed.pop()
        if self._next_fresh < self._arena.touched_slots:
            self._next_fresh += 1
            return self._next_fresh - 1
        self._evict(worth)
        return freed.pop() if freed else None

    def _evict(self, worth: float | None) -> None:
        if self._nothing_to_evict:
            return
        key = self._order.victim(self._busy, worth)
        if key is None:
            self._nothing_to_evict = worth is None
            return
        chunk = self._chunks[key]
        self.detach(chunk)
        if chunk.state is ChunkState.UNBACKED:
            self._why_not.evicted(key, Tier.DRAM)

    def _busy(self, key: Key) -> bool:
        chunk = self._chunks[key]
        return chunk.pins > 0 or chunk.state not in _EVICTABLE

    def _become(self, chunk: DramChunk, state: ChunkState) -> None:
        """Every change of state, so that what can be evicted is always counted."""
        if not (chunk.staged or chunk.detached):
            self._num_listed[chunk.state] -= chunk.readable
            self._num_listed[state] += 1
            if self._late and state is ChunkState.UNBACKED:
                self._worthless.add(chunk.key)
            elif self._worthless:
                self._worthless.discard(chunk.key)
        chunk.state = state
        if state >= ChunkState.CLEAN:
            self._nothing_to_evict = False

    def _free_if_done(self, chunk: DramChunk) -> None:
        if chunk.in_use or not (chunk.detached or chunk.staged):
            return
        if not chunk.detached:
            chunk.detached = True
            del self._chunks[chunk.key]
            self._readable.pop(chunk.key, None)
        self._by_slot[chunk.slot] = None
        self._freed.append(chunk.slot)
