"""Page-locks a mapping for CUDA in the background: an engine starts at once, and until a slot is
pinned its copies are slower but right.

    slots    0 ............ pinned_slots ..... touched_slots ........ num_slots
             registered     registered next    waits to be populated

Piece by piece behind an arena that grows, not when it is whole: the first slots are the first to be
used, and memory that the machine never gives would hold back all that it gave.
"""

import logging
import threading
from contextlib import suppress

from .arena import ArenaMapping, SharedArena
from .cuda_runtime import CudaRuntime, memlock_hint

PIECE_BYTES = 1 << 30
"""Registered per call, if a slot is not larger. CUDA holds up whoever launches for as long as one
call takes, close() waits as long, and some drivers refuse more than 64 GiB at once."""

_STEP_S = 0.1
_log = logging.getLogger(__name__)


class ArenaPinner:
    """Owns the registration of one mapping and its pinned_slots. Close it before the mapping.

    Everything CUDA is asked comes from its own thread, so a refusal is nobody else's error.
    """

    def __init__(self, mapping: ArenaMapping, cuda: CudaRuntime) -> None:
        self._mapping = mapping
        self._cuda = cuda
        self._address = mapping.address
        # Pieces end between slots: CUDA refuses a copy that lies in two of them.
        self._piece_slots = max(1, PIECE_BYTES // mapping.slot_bytes)
        self._pieces: list[int] = []  # addresses, in order
        self._settled = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rootcellar-pin", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Block until no more slots will be pinned; False when that takes longer."""
        return self._settled.wait(timeout_s)

    def close(self) -> None:
        """Unregister everything, after the piece under way; no copy may be. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._pin()
        finally:
            self._settled.set()
            self._closing.wait()
            self._unpin()

    def _pin(self) -> None:
        mapping = self._mapping
        while (start := mapping.pinned_slots) < mapping.num_slots:
            stop = self._wait_touched(min(start + self._piece_slots, mapping.num_slots))
            if self._closing.is_set() or stop == start:
                return
            address, size_bytes = self._piece(start, stop)
            if (refusal := self._register(address, size_bytes)) is not None:
                _warn(mapping, size_bytes, refusal)
                return
            self._pieces.append(address)
            mapping.pinned_slots = stop

    def _wait_touched(self, stop: int) -> int:
        """`stop` once its slots have memory, or what there is of them if no more will come.

        Registering what an arena has not populated would race it for memory that it may never
        offer. Who attached to one cannot know how far it is, and registers all.
        """
        arena = self._mapping
        if isinstance(arena, SharedArena):
            while not arena.wait_touched(stop, _STEP_S):
                if self._closing.is_set() or not arena.growing:
                    return min(stop, arena.touched_slots)
        return stop

    def _piece(self, start: int, stop: int) -> tuple[int, int]:
        """Where slots [start, stop) begin, and their bytes."""
        slot_bytes = self._mapping.slot_bytes
        return self._address + start * slot_bytes, (stop - start) * slot_bytes

    def _register(self, address: int, size_bytes: int) -> str | None:
        """Why not, if CUDA refuses."""
        try:
            code = self._cuda.register(address, size_bytes)
        except RuntimeError as error:  # this process cannot have CUDA
            return str(error)
        return None if code == 0 else self._cuda.describe(code)

    def _unpin(self) -> None:
        self._mapping.pinned_slots = 0  # first: whoever asks must not rely on what is going
        while self._pieces:
            with suppress(RuntimeError):  # CUDA has failed as a whole and holds nothing any more
                self._cuda.unregister(self._pieces.pop())


def _warn(mapping: ArenaMapping, size_bytes: int, refusal: str) -> None:
    hint = memlock_hint()
    _log.warning(
        "%d of %d bytes of DRAM are pinned, copies of the others are slower: "
        "cudaHostRegister refused %d bytes more: %s%s",
        mapping.pinned_slots * mapping.slot_bytes,
        mapping.num_slots * mapping.slot_bytes,
        size_bytes,
        refusal,
        f" ({hint})" if hint else "",
    )
