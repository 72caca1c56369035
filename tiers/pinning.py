"""Pins the arena for CUDA in the background, once its memory is populated: a store opens at once,
and copies are merely slower until then."""

import logging
import threading

from .arena import SharedArena
from .pinned import CudaRuntime, Pinned, pin

_log = logging.getLogger(__name__)
_STEP_S = 0.1


class ArenaPinner:
    """Owns the registration. Close it before the arena."""

    def __init__(self, arena: SharedArena, cudart: CudaRuntime) -> None:
        self._arena = arena
        self._cudart = cudart
        self._closing = False
        self.pinned: Pinned | None = None
        """None until the arena was populated and CUDA was asked."""
        self._thread = threading.Thread(target=self._run, name="rootcellar-pin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Unregister. Idempotent."""
        self._closing = True
        self._thread.join()
        if self.pinned is not None:
            self.pinned.unpin()

    def _run(self) -> None:
        arena = self._arena
        while not arena.wait_touched(arena.num_slots, _STEP_S):
            if self._closing or arena.populate_error is not None:
                return
        self.pinned = pin(arena.address, arena.slot_bytes * arena.num_slots, self._cudart)
        if self.pinned.reason:
            _log.warning("DRAM is not pinned, copies will be slower: %s", self.pinned.reason)
