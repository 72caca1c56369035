"""An open store seen as a whole: for observers, for people and for tests."""

from typing import Any

from ..admission.base import Tier
from .cold import ColdTiers
from .dram import ChunkState


def tell_all(cold: ColdTiers) -> None:
    """Tell the event log, which just started, of every chunk that can be had."""
    for chunk in cold.dram:
        if chunk.readable and not chunk.staged:
            cold.events.stored(Tier.DRAM, chunk.key)
    for key in cold.nvme.readable_keys():
        cold.events.stored(Tier.NVME, key)


def snapshot(cold: ColdTiers, *, open_loads: int) -> dict[str, Any]:
    """Counters since opening and gauges of now, as plain numbers and dicts."""
    slots, slot_bytes = cold.arena.num_slots, cold.arena.slot_bytes
    return cold.metrics.snapshot() | {
        "why_not": dict(cold.why_not.counts),
        "open_loads": open_loads,
        "writes_pending": cold.flusher.pending,
        "o_direct": cold.o_direct,
        "trace_dropped_requests": cold.learning.dropped_requests,
        "dram": {
            "slots": slots,
            "slots_used": len(cold.dram),
            "slots_touched": cold.arena.touched_slots,
            "slots_pinned": cold.dram.num_pinned,
            "slots_undecided": cold.dram.num_undecided,
            "slot_bytes": slot_bytes,
            "bytes_used": len(cold.dram) * slot_bytes,
            "bytes": slots * slot_bytes,
            "bytes_page_locked": cold.arena.pinned_slots * slot_bytes,
        },
        "nvme": cold.nvme.stats(),
    }


def check_integrity(cold: ColdTiers) -> None:
    """Raise AssertionError if any invariant is broken."""
    cold.dram.check_integrity()
    cold.nvme.check_integrity()
    for chunk in cold.dram:
        assert chunk.parent is None or cold.expects(chunk.parent), "a chunk hangs from nothing"
        on_nvme = cold.nvme.holds(chunk.key)
        clean = chunk.state is ChunkState.CLEAN or chunk.staged
        assert on_nvme or not clean, "a clean or staged chunk is not on nvme"
        off_nvme = chunk.state in (ChunkState.UNDECIDED, ChunkState.DIRTY, ChunkState.UNBACKED)
        assert not (off_nvme and cold.nvme.expects(chunk.key)), "a chunk on nvme is to be written"
