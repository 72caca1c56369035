"""The one account of every byte on disk, and what goes when room is needed.

    used = resident files + what jobs under way may hold + dropped folders + what could not go

Bytes are counted from the moment a job may use them until the job is known to be done.
"""

from collections.abc import Callable

from ..admission.base import EvictionOrder, Key
from ..admission.lru import LruOrder
from .dropped import DroppedFolders
from .io.base import FileRef
from .ledger import Ledger
from .shelf import Shelf


class DiskAccount:
    """Files of this namespace (`own`) and of all others (`foreign`) share one budget.

    busy says of a key of ours that its file must stay; on_evicted is told each that goes.
    """

    def __init__(
        self,
        budget_bytes: int,
        ledger: Ledger,
        dropped: DroppedFolders,
        order: EvictionOrder,
        busy: Callable[[Key], bool],
        on_evicted: Callable[[Key], None],
    ) -> None:
        self.budget_bytes = budget_bytes
        self.own = Shelf(order)
        self.foreign = Shelf(LruOrder())
        self._ledger = ledger
        self._dropped = dropped
        self._busy = busy
        self._on_evicted = on_evicted

    @property
    def resident_bytes(self) -> int:
        return self.own.resident_bytes + self.foreign.resident_bytes

    @property
    def used_bytes(self) -> int:
        under_way = self._ledger.charged_bytes + self._ledger.leaked_bytes
        return self.resident_bytes + under_way + self._dropped.used_bytes

    @property
    def room_may_come(self) -> bool:
        """Whether bytes come free that no chunk has to make room for."""
        return bool(self._dropped)

    def make_room(self, need_bytes: int, worth: float | None = None) -> list[FileRef] | None:
        """Victims whose bytes, with what is free, hold need_bytes; already unreachable. Of ours,
        with a worth, only what is worth less.

        None when that cannot be had; victims found by then are deleted all the same.
        """
        victims: list[FileRef] = []
        freed_bytes = 0
        while self.used_bytes + max(need_bytes, freed_bytes) > self.budget_bytes:
            victim = self._evict(worth)
            if victim is None:
                self._ledger.delete(victims)
                return None
            victims.append(victim)
            freed_bytes += victim.file_bytes
        return victims

    def trim(self) -> None:
        """Evict what a smaller budget than last time no longer holds."""
        victims: list[FileRef] = []
        excess_bytes = self.used_bytes - self.budget_bytes
        while excess_bytes > 0 and (victim := self._evict()) is not None:
            victims.append(victim)
            excess_bytes -= victim.file_bytes
        self._ledger.delete(victims)

    def check_integrity(self) -> None:
        self.own.check_integrity()
        self.foreign.check_integrity()
        self._ledger.check_integrity()
        assert self.resident_bytes <= self.budget_bytes  # what was trimmed is still being deleted

    def _evict(self, worth: float | None = None) -> FileRef | None:
        """Take the victim that was unused for longest out of memory; its file is the caller's."""
        candidates: list[tuple[float, Key, Shelf]] = []
        for shelf in (self.foreign, self.own):
            key = shelf.order.victim(self._is_busy, worth)
            row = None if key is None else shelf.table.row(key)
            if key is not None and row is not None:
                candidates.append((shelf.table.last_use_s[row], key, shelf))
        if not candidates:
            return None
        _, key, shelf = min(candidates, key=lambda candidate: candidate[0])
        file = shelf.take(key)
        if shelf is self.own:
            self._on_evicted(key)
        return file

    def _is_busy(self, key: Key) -> bool:
        row = self.own.table.row(key)
        if row is None:
            return False  # of another namespace: nobody here uses it
        return bool(self.own.table.writing[row]) or self._busy(key)
