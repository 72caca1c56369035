"""Why a chunk is not there: the last reasons, bounded, for lookup's `why_not` and for people."""

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import chain, islice

from ..admission.base import Chain, Key, Tier

NEVER_SEEN = "never seen"
NAMESPACE_CHANGED = "namespace changed"
REFUSED = "refused by admission"
SAME_TIME_S = 0.1
"""Evictions this close together share one entry."""


class WhyNot:
    """Remembers `max_entries` keys; those recorded longest ago are forgotten first."""

    def __init__(self, max_entries: int = 65_536) -> None:
        self._max_entries = max_entries
        # Oldest first; when, by time.monotonic(), is known of what was evicted.
        self._reasons: OrderedDict[Key, tuple[str, float | None]] = OrderedDict()
        self._evicted = {tier: (f"evicted from {tier}", -SAME_TIME_S) for tier in Tier}
        self.counts: Counter[str] = Counter()
        """Chunks by reason, without what a policy said."""

    def record(self, keys: Chain, reason: str) -> None:
        self.counts[reason] += len(keys)
        self._remember(keys, reason)

    def refused(self, keys: Chain, by: str) -> str:
        """Admission kept these out; `by` is what it said. Returns the reason."""
        reason = f"{REFUSED}: {by}" if by else REFUSED
        self.counts[REFUSED] += len(keys)
        self._remember(keys, reason)
        return reason

    def evicted(self, key: Key, tier: Tier) -> None:
        now_s, (reason, last_s) = time.monotonic(), self._evicted[tier]
        if now_s > last_s + SAME_TIME_S:
            self._evicted[tier] = reason, now_s
        self.counts[reason] += 1
        reasons = self._reasons
        reasons[key] = self._evicted[tier]
        reasons.move_to_end(key)
        if len(reasons) > self._max_entries:
            reasons.popitem(last=False)

    def reason(self, key: Key) -> str:
        reason, when_s = self._reasons.get(key, (NEVER_SEEN, None))
        return reason if when_s is None else f"{reason} {_age(time.monotonic() - when_s)} ago"

    def change_namespace(self, here: Iterable[Key]) -> None:
        """Keys that are here, or that had a reason, mean nothing any more; the counts stay."""
        known = islice(chain(here, self._reasons), self._max_entries)
        self._reasons = OrderedDict.fromkeys(known, (NAMESPACE_CHANGED, None))

    def _remember(self, keys: Chain, reason: str) -> None:
        reasons, entry = self._reasons, (reason, None)
        for key in keys:
            reasons[key] = entry
            reasons.move_to_end(key)
        while len(reasons) > self._max_entries:
            reasons.popitem(last=False)


def _age(seconds: float) -> str:
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"
