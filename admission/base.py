"""The protocol every policy speaks: observe a request's chain, decide at a boundary, name a victim.

Keys are opaque bytes; a chain is the keys of one request, head first. Policies never see payload
and never do IO, so the live tiers and the trace replay run the same objects.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

Key = bytes
Chain = Sequence[Key]


class Tier(StrEnum):
    HBM = "hbm"
    DRAM = "dram"
    NVME = "nvme"


class Boundary(StrEnum):
    """A crossing at which a chain is valued; each costs something different."""

    INTO_HBM = "into_hbm"
    INTO_DRAM = "into_dram"
    ONTO_NVME = "onto_nvme"
    NVME_TO_DRAM = "nvme_to_dram"


class Answer(StrEnum):
    ADMIT = "admit"
    REJECT = "reject"
    THROTTLE = "throttle"
    """Worth it, but not now: a budget is spent. The same offer may be admitted later."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Chunks chain[start:] knock at a boundary; chain[:start] is already beyond it.

    ONTO_NVME offers may leave out the head of the chain: what is offered then is all of `chain`.

    write_bytes: estimated bytes the medium beyond the boundary would be written for all of them.
    free_chunks: how many fit without evicting anything.
    """

    boundary: Boundary
    chain: Chain
    start: int
    write_bytes: int
    free_chunks: int


@dataclass(frozen=True, slots=True)
class Decision:
    """chain[start:stop] may cross; the rest may not, for `reason`. Prefix-closed by its shape.

    worth: one value per chunk of chain[start:stop]. A chunk may take the place only of one that the
    order of that tier holds to be worth less. Empty where whatever is there must make room.
    """

    answer: Answer
    stop: int
    reason: str = ""
    worth: Sequence[float] = ()


class EvictionOrder(ABC):
    """The order in which one tier lets go of its chunks: always a chain's tail before its head.

    Holds keys only. A key may be added before its parent (the parent may live in another tier);
    a key with a resident child is never named as victim.
    """

    @abstractmethod
    def add(self, key: Key, parent: Key | None) -> None:
        """`key` became resident. parent is the key before it in its chain, None for a head."""

    @abstractmethod
    def touch(self, chain: Chain, stop: int) -> None:
        """chain[:stop] was used by a request; keys that are not resident are passed over."""

    @abstractmethod
    def discard(self, key: Key) -> None:
        """`key` is no longer resident; unknown keys are passed over."""

    @abstractmethod
    def victim(self, busy: Callable[[Key], bool], worth: float | None = None) -> Key | None:
        """The next key to evict, or None. Never one that is busy or has a resident child.

        worth: of what would take its place. None then also says that nothing here is worth less;
        orders that put no value on a key ignore it.
        """

    @abstractmethod
    def descendants(self, key: Key) -> list[Key]:
        """Resident keys below `key`, parents before children; `key` itself need not be resident."""

    @abstractmethod
    def has_child(self, key: Key) -> bool:
        """Whether any resident key has `key` as its parent; `key` itself need not be resident."""

    @abstractmethod
    def __contains__(self, key: Key) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if any invariant is broken."""


class AdmissionPolicy(ABC):
    """What may live where. One object per store; called on the engine's thread only."""

    def open(self, capacity: Mapping[Tier, int]) -> None:  # noqa: B027  # most need not know
        """How many chunks each tier of the store holds, tiers that it lacks left out. Called once,
        before anything else."""

    @abstractmethod
    def observe(self, chain: Chain, now_s: float) -> None:
        """A request with this chain arrived. Called once per request, before any decision on it.

        now_s is seconds on any clock that never runs backwards.
        """

    @abstractmethod
    def decide(self, offer: Offer) -> Decision:
        """How much of an offered chain may cross. Changes nothing the next call could notice,
        save budgets it grants from."""

    @abstractmethod
    def order(self, tier: Tier) -> EvictionOrder:
        """A new, empty order for one tier: when a store opens, and when it is invalidated."""

    def save(self) -> bytes:
        """What was learned, for restore() of another process; empty where nothing is kept."""
        return b""

    def restore(self, data: bytes) -> None:  # noqa: B027  # most policies keep nothing
        """Go on from what save() gave, maybe of another version: what cannot be used is ignored.
        Called once, after open() and before any request."""
