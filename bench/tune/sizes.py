"""Which capacities a trace is replayed with: shares of its distinct chunks, or bytes of a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from .trace import Trace

SWEEP = (0.01, 0.02, 0.05, 0.10, 0.20, 0.50)


@dataclass(frozen=True, slots=True)
class Capacity:
    """At least one chunk each; nvme_chunks is 0 and nvme_share None without the tier."""

    dram_chunks: int
    nvme_chunks: int
    dram_share: float
    """Of distinct chunks, as the nvme_share is."""
    nvme_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the user asked for. Shares are of distinct chunks; each of nvme_shares is combined with
    each of shares. Bytes are of the machine that there is or may be, and make one capacity more;
    what an engine caches in HBM counts as DRAM."""

    shares: Sequence[float] = ()
    nvme_shares: Sequence[float] = ()
    hbm_bytes: int = 0
    dram_bytes: int = 0
    nvme_bytes: int = 0

    def __post_init__(self) -> None:
        for name, shares in (("--share", self.shares), ("--nvme-share", self.nvme_shares)):
            for share in shares:
                if not 0 < share <= 1:
                    raise ValueError(f"{name} is {share}, must be above 0 and at most 1")
        if self.nvme_shares and not self.shares:
            raise ValueError("--nvme-share adds a tier below --share: give both")
        if self.nvme_bytes and not self.fast_bytes:
            raise ValueError("--nvme is a tier below --dram: give both")

    @property
    def fast_bytes(self) -> int:
        return self.hbm_bytes + self.dram_bytes

    def of(self, trace: Trace, chunk_bytes: int) -> list[Capacity]:
        """Each once, in the order asked for; the sweep when nothing was."""
        shares = self.shares if self.shares or self.fast_bytes else SWEEP
        found = [
            _of_shares(share, nvme_share, trace.distinct)
            for share in shares
            for nvme_share in self.nvme_shares or (None,)
        ]
        if self.fast_bytes:
            found.append(self._of_bytes(chunk_bytes, trace.distinct))
        return list(dict.fromkeys(found))

    def _of_bytes(self, chunk_bytes: int, distinct: int) -> Capacity:
        dram, nvme = self.fast_bytes // chunk_bytes, self.nvme_bytes // chunk_bytes
        if not dram or (self.nvme_bytes and not nvme):
            raise ValueError(f"--dram and --nvme must hold a chunk of {chunk_bytes} bytes each")
        return Capacity(dram, nvme, dram / distinct, nvme / distinct if nvme else None)


def _of_shares(dram: float, nvme: float | None, distinct: int) -> Capacity:
    nvme_chunks = 0 if nvme is None else max(1, round(nvme * distinct))
    return Capacity(max(1, round(dram * distinct)), nvme_chunks, dram, nvme)
