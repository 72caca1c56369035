"""Page-locking the arena for CUDA, so that copies to and from it run beside everything else."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

PIECE_BYTES = 64 << 30
"""Most memory registered per call: larger ones are refused by some drivers."""

_PORTABLE = 1  # pinned for every CUDA context of the process


class CudaRuntime(Protocol):
    """The two calls of CUDA's runtime that pinning takes; `torch.cuda.cudart()` has them.

    Both return 0 for success.
    """

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int, /) -> int: ...

    def cudaHostUnregister(self, address: int, /) -> int: ...


@dataclass(slots=True)
class Pinned:
    """What is page-locked. The owner calls unpin() before the memory is unmapped."""

    cudart: CudaRuntime
    pieces: list[int] = field(default_factory=list[int])
    """Addresses registered, in order."""
    reason: str = ""
    """Why nothing is pinned; empty when everything is."""

    def unpin(self) -> None:
        """Unregister everything. Idempotent."""
        while self.pieces:
            self.cudart.cudaHostUnregister(self.pieces.pop())


def pin(
    address: int, size_bytes: int, cudart: CudaRuntime, piece_bytes: int = PIECE_BYTES
) -> Pinned:
    """Pin [address, address + size_bytes), all of it or, with a reason, nothing.

    Populates what was not touched yet, so it may take as long as that.
    """
    pinned = Pinned(cudart)
    for start, size in _pieces(size_bytes, piece_bytes):
        code = int(cudart.cudaHostRegister(address + start, size, _PORTABLE))
        if code != 0:
            pinned.unpin()
            pinned.reason = f"cudaHostRegister refused {size} bytes with error {code}"
            break
        pinned.pieces.append(address + start)
    return pinned


def _pieces(size_bytes: int, piece_bytes: int) -> Sequence[tuple[int, int]]:
    starts = range(0, size_bytes, piece_bytes)
    return [(start, min(piece_bytes, size_bytes - start)) for start in starts]
