"""What the tiers ask the policy: how much of a chain may cross a boundary, and what it is worth."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..admission.base import AdmissionPolicy, Answer, Boundary, Chain, Offer
from .chunk_file import file_bytes
from .dram import DramTier
from .io.base import Codec
from .layout import KVLayout
from .metrics import Metrics
from .noop import NoNvme
from .nvme import NvmeTier

WORTH_LESS = "worth less than what is there"


@dataclass(frozen=True, slots=True)
class Admitted:
    """chain[start:stop] may cross; `why` says why the rest may not.

    worth: of each chunk of chain[start:stop], empty where whatever is there must make room.
    """

    start: int
    stop: int
    why: str
    worth: Sequence[float]

    def worth_of(self, index: int) -> float | None:
        """Of chain[index]."""
        return self.worth[index - self.start] if self.worth else None


class Offers:
    def __init__(
        self,
        policy: AdmissionPolicy,
        layout: KVLayout,
        dram: DramTier,
        nvme: NvmeTier | NoNvme,
        metrics: Metrics,
    ) -> None:
        self._policy = policy
        self._chunk_bytes = layout.chunk_bytes
        self._file_bytes = file_bytes(layout.chunk_bytes, Codec.RAW)
        self._dram = dram
        self._nvme = nvme
        self._metrics = metrics

    def ask(
        self, boundary: Boundary, chain: Chain, start: int, free_chunks: int | None = None
    ) -> Admitted:
        """free_chunks: of HBM, which only its owner knows. Refused chunks are counted."""
        if free_chunks is None:
            free_chunks = self._free_chunks(boundary)
        made = self._decide(boundary, chain, start, free_chunks)
        self._metrics.refuse(boundary, made.why, len(chain) - made.stop)
        return made

    def ask_path(self, path: Chain) -> Admitted:
        """For chunks that can go onto NVMe only with all before them in `path`."""
        made = self._decide(Boundary.ONTO_NVME, path, 0, self._free_chunks(Boundary.ONTO_NVME))
        self._metrics.refuse(Boundary.ONTO_NVME, made.why, len(path) - made.stop)
        return made

    def _free_chunks(self, boundary: Boundary) -> int:
        if boundary is Boundary.ONTO_NVME:
            return self._nvme.free_bytes // self._file_bytes
        return self._dram.unused_slots

    def _decide(self, boundary: Boundary, chain: Chain, start: int, free_chunks: int) -> Admitted:
        chunk_bytes = self._file_bytes if boundary is Boundary.ONTO_NVME else self._chunk_bytes
        write_bytes = (len(chain) - start) * chunk_bytes
        decision = self._policy.decide(Offer(boundary, chain, start, write_bytes, free_chunks))
        stop = max(start, min(decision.stop, len(chain)))
        if decision.answer is not Answer.ADMIT:
            stop = start
        return Admitted(start, stop, decision.reason, decision.worth)
