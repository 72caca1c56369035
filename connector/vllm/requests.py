"""What the manager remembers of one request, from its arrival until its last transfer is done."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey

from ...tiers.base import Key, Load, StoreJob
from ...tiers.chain import CheckedChain
from .names import Names
from .slots import SlotSpec


@dataclass(slots=True, eq=False)
class Storing:
    """One store of the engine, with our jobs by group."""

    jobs: list[tuple[int, StoreJob]]
    keys: set[OffloadKey]
    slots: SlotSpec
    began_s: float
    failed: set[int] = field(default_factory=set[int])
    """Groups of which not all bytes will be there."""


@dataclass(slots=True, eq=False)
class RequestState:
    """block_hashes is the engine's own list, which grows as the request does."""

    names: Names
    block_hashes: Sequence[bytes]
    chain: CheckedChain = field(default_factory=lambda: CheckedChain(()))
    """Keys of its whole chunks in the main group, head first."""
    asked_s: float | None = None
    """When it first had to wait for NVMe; None while it does not wait."""
    gave_up: bool = False
    """A read was late, cut short or not begun in time: what is not in DRAM is recomputed."""
    answered: bool = False
    """It was told what can be had, without having to wait."""
    prefetch: Load | None = None
    """Of the main group; pinned for this request until it runs or ends."""
    beside: dict[Key, Load] = field(default_factory=dict[Key, Load])
    """The same for chunks of other groups, one load each."""
    loads: list[Load] = field(default_factory=list[Load])
    """Handed to the engine; complete_load returns them."""
    load_began_s: float = 0.0
    storing: list[Storing] = field(default_factory=list[Storing])
    outlived_reset: bool = False
    """Nothing that it computes is stored any more."""
    finished: bool = False

    def extend(self, group_id: int, hashes_per_chunk: int) -> None:
        """Take in the chunks completed since the last call."""
        first = (len(self.chain) + 1) * hashes_per_chunk - 1
        if first < len(self.block_hashes):
            hashes = self.block_hashes[first::hashes_per_chunk]
            self.chain = CheckedChain((*self.chain, *self.names.keys(hashes, group_id)))

    def waiting(self) -> list[Load]:
        """Loads that pin chunks for it and that the engine was not given yet."""
        main = [] if self.prefetch is None else [self.prefetch]
        return main + list(self.beside.values())

    def ask_afresh(self) -> None:
        """It goes back to the queue: the next lookup may wait for NVMe again."""
        self.asked_s, self.gave_up, self.answered = None, False, False
