"""How much may be written to a drive, spent on what is most likely to come back.

A token bucket: tokens (bytes) come at a steady rate up to a burst, and are never owed, so that what
was granted by a time t after the start is at most burst + rate * t. First come, first served would
spend them on whatever is offered right after tokens came. So chunks must also be worth as much as
the best share of the latest offers that tokens suffice for; the share grows when tokens pile up.
CacheLib's dynamic random admission (Berg et al., OSDI 2020) turns a probability up and down in the
same way; here it is a threshold.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_DAY_S = 86_400.0
_HOUR_S = 3_600.0
_LATEST = 1024
"""Chunks that were offered last: the sample from which the threshold is taken."""


@dataclass(frozen=True, slots=True)
class _Offered:
    worth: float
    size_bytes: int
    time_s: float


class WriteBudget:
    """rate_bytes_s: what may be written for good; burst_bytes: what may be saved up, and is there
    at the start. With a clock that counts chunk references and sizes of 1 it is a budget of writes
    per reference.
    """

    def __init__(self, *, rate_bytes_s: float, burst_bytes: float) -> None:
        for name, value in (("rate_bytes_s", rate_bytes_s), ("burst_bytes", burst_bytes)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}, must be at least 0 and finite")
        self._rate_bytes_s = rate_bytes_s
        self._burst_bytes = burst_bytes
        self._tokens_bytes = float(burst_bytes)
        self._now_s = -math.inf
        self._latest: deque[_Offered] = deque()
        self._latest_bytes = 0
        self._worths: list[float] = []  # of _latest, ascending

    @classmethod
    def per_day(cls, bytes_per_day: float, *, burst_bytes: float | None = None) -> "WriteBudget":
        """burst_bytes: an hour's worth unless given."""
        rate_bytes_s = bytes_per_day / _DAY_S
        burst_bytes = rate_bytes_s * _HOUR_S if burst_bytes is None else burst_bytes
        return cls(rate_bytes_s=rate_bytes_s, burst_bytes=burst_bytes)

    @classmethod
    def dwpd(cls, drive_bytes: float, writes_per_day: float = 1.0) -> "WriteBudget":
        """Drive writes per day: how often the whole drive may be written each day."""
        return cls.per_day(drive_bytes * writes_per_day)

    @property
    def tokens_bytes(self) -> float:
        """What may be granted now."""
        return self._tokens_bytes

    def advance(self, now_s: float) -> None:
        """The clock reads now_s; it never runs backwards, and starts with the first call."""
        if self._now_s != -math.inf:
            earned = max(0.0, now_s - self._now_s) * self._rate_bytes_s
            self._tokens_bytes = min(float(self._burst_bytes), self._tokens_bytes + earned)
        self._now_s = max(self._now_s, now_s)

    def spend(self, chunk_bytes: int, worth: Sequence[float], *, whole: bool = False) -> int:
        """How many leading chunks of an offer may be written; that much is spent.

        worth: one value per chunk, on any scale that stays the same from offer to offer. A chunk
        counts as worth what the best chunk behind it is: that cannot be used without it.
        whole: nothing is granted that is not granted to the end, since it would be of no use.
        """
        self._note(chunk_bytes, worth)
        threshold = self._threshold()
        wanted = max((i + 1 for i, value in enumerate(worth) if value >= threshold), default=0)
        affordable = int(self._tokens_bytes // chunk_bytes) if chunk_bytes else wanted
        granted = min(wanted, affordable)
        if whole and granted < len(worth):
            return 0
        self._tokens_bytes -= granted * chunk_bytes
        return granted

    def save(self) -> bytes:
        """The tokens left: a restart brings no new burst."""
        return self._tokens_bytes.hex().encode()

    def restore(self, data: bytes) -> bool:
        """Go on with the tokens that save() gave; False when they make no sense."""
        try:
            tokens_bytes = float.fromhex(data.decode("ascii"))
        except ValueError:
            return False
        if not 0 <= tokens_bytes < math.inf:
            return False
        self._tokens_bytes = min(tokens_bytes, float(self._burst_bytes))
        return True

    def _note(self, chunk_bytes: int, worth: Sequence[float]) -> None:
        for value in worth[:_LATEST]:
            self._latest.append(_Offered(value, chunk_bytes, self._now_s))
            self._latest_bytes += chunk_bytes
            insort(self._worths, value)
        while len(self._latest) > _LATEST:
            oldest = self._latest.popleft()
            self._latest_bytes -= oldest.size_bytes
            del self._worths[bisect_left(self._worths, oldest.worth)]

    def _threshold(self) -> float:
        """The least worth in the best share of the latest offers: the share that can be paid from
        what was earned since the oldest of them. The bucket is steered to half full by that, so
        that the best seldom find it empty."""
        if not self._latest:
            return -math.inf
        since_s = self._latest[0].time_s
        # Offers from before the clock began count as made when it did.
        past_s = self._now_s - since_s if since_s > -math.inf else 0.0
        earned = self._rate_bytes_s * max(0.0, past_s)
        spare = self._tokens_bytes - self._burst_bytes / 2
        share = max(0.0, earned + spare) / max(1, self._latest_bytes)
        rank = len(self._worths) - math.ceil(share * len(self._worths))
        if rank >= len(self._worths):
            return math.nextafter(self._worths[-1], math.inf)
        return self._worths[rank] if rank > 0 else -math.inf
