"""The learned policy, as a store sees it."""

import logging
import time
from collections.abc import Mapping
from functools import cache

import numpy as np

from ..base import (
    AdmissionPolicy,
    Answer,
    Boundary,
    Chain,
    Decision,
    EvictionOrder,
    Offer,
    Tier,
)
from ..lru import LruOrder
from ..write_budget import WriteBudget
from .hazard import REFIT_EVERY
from .history import observe
from .judge import (
    SEEN_IN_HBM,
    WRITE_ABOVE,
    chance_on_nvme,
    worth_of_missing,
    worth_promoting,
    worth_writing,
)
from .order import WorthOrder
from .places import index_of
from .records import NONE, Model, Rows
from .rows import RowBook
from .saved import pack, unpack

GHOSTS = 16
"""Chunks remembered for each that the largest tier holds."""
MOST_GHOSTS = 1 << 20
"""But no more than that, unless the tier itself holds more."""
MAX_DRAM_SHARE = 0.5
"""Of DRAM, for the new chunks of one request: a prompt that is longer than all the rest together
must not displace it."""

NOT_LIKELY = "not likely to be used while nvme would keep it"
TOO_MANY = f"a request's new chunks get {MAX_DRAM_SHARE:.0%} of dram at most"
BUDGET_IS_SPENT = "write budget is spent"
WORTH_LESS_IN_DRAM = "worth less than what is in dram"

log = logging.getLogger(__name__)


class Learned(AdmissionPolicy):
    """Learns online when chunks of each kind are used again; without settings of its own.

    write_budget: what may be written to NVMe over time; None writes all that is worth it.
    """

    def __init__(self, *, write_budget: WriteBudget | None = None) -> None:
        self._budget = write_budget
        self._orders: dict[Tier, WorthOrder] = {}
        self._by_use: LruOrder | None = None
        self._start({Tier.DRAM: 1})

    def open(self, capacity: Mapping[Tier, int]) -> None:
        """The first time ever, it takes half a minute to compile what the policy runs."""
        _compile()
        self._start(capacity)

    def _start(self, capacity: Mapping[Tier, int]) -> None:
        cold: dict[Tier, int] = {
            tier: chunks for tier, chunks in capacity.items() if tier is not Tier.HBM
        }
        self._capacity = cold
        lowest: Tier = Tier.NVME if Tier.NVME in cold else Tier.DRAM
        self._book = RowBook({lowest: cold[lowest]}, most_ghosts(max(cold.values())))
        self._orders = {}

    def observe(self, chain: Chain, now_s: float) -> None:
        self._settle()
        if chain:
            rows = self._book.give(chain)
            observe(self._book.model, rows, now_s)
        if self._budget is not None:
            self._budget.advance(now_s)

    def decide(self, offer: Offer) -> Decision:
        self._settle()
        rows = self._book.find(offer.chain)
        unknown = np.flatnonzero(rows == NONE)  # generated since, or nobody told of the request
        if len(unknown) and offer.boundary is Boundary.ONTO_NVME:
            return self._stranger_onto_nvme(offer)
        if len(unknown):
            rows = rows[: unknown[0]]
        if not len(rows) or offer.start >= len(offer.chain):
            return Decision(Answer.ADMIT, len(offer.chain))
        match offer.boundary:
            case Boundary.INTO_HBM:
                return self._into_hbm(offer, rows)
            case Boundary.INTO_DRAM:
                return self._into_dram(offer, rows)
            case Boundary.NVME_TO_DRAM:
                return self._promote(offer, rows)
            case Boundary.ONTO_NVME:
                return self._onto_nvme(offer, rows)

    def order(self, tier: Tier) -> EvictionOrder:
        """Above NVMe, DRAM loses what was unused for longest: that leaves most time to learn what
        is worth a write. Elsewhere what is worth least goes."""
        if tier not in self._book.places:
            order = LruOrder()
            if tier is Tier.DRAM:
                self._by_use = order
            return order
        if tier in self._orders:
            self._orders[tier].clear()
        self._orders[tier] = worth_order = WorthOrder(self._book, tier)
        return worth_order

    def save(self) -> bytes:
        tokens = b"" if self._budget is None else self._budget.save()
        return pack(self._book.model) + tokens

    def restore(self, data: bytes) -> None:
        rest = unpack(self._book.model, data)
        if rest is not None and self._budget is not None:
            self._budget.restore(rest)

    @property
    def model(self) -> Model:
        """What was learned; until the next call of anything else."""
        return self._book.model

    @property
    def num_tracked(self) -> int:
        """Chunks that anything is known of."""
        return len(self._book)

    def check_integrity(self) -> None:
        """Raise AssertionError if any invariant is broken."""
        self._settle()
        self._book.check_integrity()
        for order in self._orders.values():
            order.check_integrity()

    def _stranger_onto_nvme(self, offer: Offer) -> Decision:
        """What was generated, or nobody told of: its worth will be known when it is used."""
        if not self._pays(offer, len(offer.chain), WRITE_ABOVE):
            return Decision(Answer.THROTTLE, offer.start, BUDGET_IS_SPENT)
        return Decision(Answer.ADMIT, len(offer.chain))

    def _pays(self, offer: Offer, stop: int, chance: float) -> bool:
        """Whether the write budget, if there is one, covers chain[start:stop]."""
        if self._budget is None or stop == offer.start:
            return True
        chunk_bytes = offer.write_bytes // (len(offer.chain) - offer.start)
        num_chunks = stop - offer.start
        return self._budget.spend(chunk_bytes, [chance] * num_chunks, whole=True) == num_chunks

    def _settle(self) -> None:
        for order in self._orders.values():
            order.settle()

    def _into_hbm(self, offer: Offer, rows: Rows) -> Decision:
        """What was asked for again, and whatever there is room for."""
        fits = offer.start + offer.free_chunks
        if fits >= len(offer.chain):
            return Decision(Answer.ADMIT, len(offer.chain))
        seen = self._book.model.chunks["touches"][rows] >= SEEN_IN_HBM
        again = len(rows) if seen.all() else int(np.argmin(seen))
        stop = max(offer.start, fits, again)
        if stop == len(offer.chain):
            return Decision(Answer.ADMIT, stop)
        return _cut(offer, stop, f"seen less than {SEEN_IN_HBM} times")

    def _into_dram(self, offer: Offer, rows: Rows) -> Decision:
        length = len(offer.chain)
        most = max(1, int(MAX_DRAM_SHARE * self._capacity[Tier.DRAM]), offer.free_chunks)
        stop = min(length, offer.start + most)
        worth: list[float] = []
        if Tier.NVME not in self._capacity:
            first = min(offer.start, len(rows) - 1)
            values = np.zeros(len(rows) - first)
            worth_of_missing(self._book.model, rows, first, values)
            values = np.append(values, np.full(length - len(rows), values[-1]))
            worth = values[offer.start - first :][: stop - offer.start].tolist()
        return Decision(Answer.ADMIT, stop, "" if stop == length else TOO_MANY, worth)

    def _promote(self, offer: Offer, rows: Rows) -> Decision:
        length = len(offer.chain)
        if offer.free_chunks >= length - offer.start or offer.start >= len(rows):
            return Decision(Answer.ADMIT, length)
        coldest = None if self._by_use is None else self._by_use.coldest()
        cold = NONE if coldest is None else int(self._book.find([coldest])[0])
        if cold == NONE or worth_promoting(self._book.model, int(rows[offer.start]), cold):
            return Decision(Answer.ADMIT, length)
        return _cut(offer, offer.start, WORTH_LESS_IN_DRAM)

    def _onto_nvme(self, offer: Offer, rows: Rows) -> Decision:
        if Tier.NVME not in self._capacity:
            return Decision(Answer.ADMIT, len(offer.chain))
        model, nvme = self._book.model, self._book.places[Tier.NVME]
        stop = worth_writing(model, nvme, rows, offer.start)
        if stop == offer.start:
            return _cut(offer, stop, NOT_LIKELY)
        last = int(rows[stop - 1])
        if not self._pays(offer, stop, chance_on_nvme(model, nvme, last)):
            return Decision(Answer.THROTTLE, offer.start, BUDGET_IS_SPENT)
        worth = [index_of(model, last)] * (stop - offer.start)
        return Decision(Answer.ADMIT, stop, "" if stop == len(rows) else NOT_LIKELY, worth)


@cache
def _compile() -> None:
    """Once in a process, when a store opens, so that no request waits for it."""
    began_s = time.monotonic()
    for cold in ({Tier.DRAM: 1}, {Tier.DRAM: 1, Tier.NVME: 1}):
        policy, chain = Learned(), [b"a", b"b"]
        policy._start(cold)
        order = policy.order(Tier.NVME if Tier.NVME in cold else Tier.DRAM)
        for now_s in range(REFIT_EVERY):
            policy.observe(chain, float(now_s))
        order.add(chain[0], None)
        for boundary in Boundary:
            policy.decide(Offer(boundary, chain, 1, 1, 0))
        order.victim(lambda key: False, 1.0)
        order.victim(lambda key: True)
        order.discard(chain[0])
    took_s = time.monotonic() - began_s
    if took_s > 5:
        log.info("compiled the admission policy in %.0f s; the next start finds it done", took_s)


def most_ghosts(largest: int) -> int:
    """Ghosts that are remembered where the largest tier holds so many chunks."""
    return min(GHOSTS * largest, max(largest, MOST_GHOSTS))


def _cut(offer: Offer, stop: int, reason: str) -> Decision:
    return Decision(Answer.ADMIT if stop > offer.start else Answer.REJECT, stop, reason)
