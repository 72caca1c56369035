"""Why a chunk is not there: the last reasons, bounded, for lookup's `why_not` and for people."""

from collections import Counter, OrderedDict

from ..admission.base import Key

NEVER_SEEN = "never seen"


class WhyNot:
    """Remembers `max_entries` keys; those recorded longest ago are forgotten first."""

    def __init__(self, max_entries: int = 65_536) -> None:
        self._max_entries = max_entries
        self._reasons: OrderedDict[Key, str] = OrderedDict()
        self.counts: Counter[str] = Counter()

    def record(self, key: Key, reason: str) -> None:
        self.counts[reason] += 1
        self._reasons[key] = reason
        self._reasons.move_to_end(key)
        if len(self._reasons) > self._max_entries:
            self._reasons.popitem(last=False)

    def reason(self, key: Key) -> str:
        return self._reasons.get(key, NEVER_SEEN)

    def forget_all(self) -> None:
        """Reasons of keys that no longer mean anything; the counts stay."""
        self._reasons.clear()
