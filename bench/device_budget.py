"""Minutes, shared among sections that run one after the other.

    |-- section 1 --|---- section 2 ----|...|   each has its share of what is left when it begins
    round round r.. |

A section measures in rounds, and begins another only if one like the slowest so far still fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

Clock = Callable[[], float]
"""Seconds, from any start."""
Progress = Callable[[int, int], None]
"""Called with (done, total) as work goes on."""

_WHOLE = 1000  # the steps of progress


class Budget:
    """shares: of each section, in the order they run; only how they compare matters."""

    def __init__(
        self,
        seconds: float,
        shares: Mapping[str, int],
        progress: Progress | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        if not seconds > 0:
            raise ValueError(f"the budget is {seconds} seconds, must be above 0")
        self._shares = dict(shares)
        self._progress = progress or (lambda done, total: None)
        self._clock = clock
        self._end_s = clock() + seconds
        self._before = 0
        """Shares of the sections that began earlier."""

    def begin(self, name: str) -> Part:
        """The part of the next section; what those before it left over is shared, too."""
        whole, share = sum(self._shares.values()), self._shares[name]
        now_s = self._clock()
        left_s = max(0.0, self._end_s - now_s)
        seconds = left_s * share / (whole - self._before)
        start, stop = (self._before * _WHOLE // whole, (self._before + share) * _WHOLE // whole)
        self._before += share

        def told(fraction: float) -> None:
            self._progress(start + int(fraction * (stop - start)), _WHOLE)

        return Part(seconds, told, self._clock)


class Part:
    """One section's seconds, from now on."""

    def __init__(
        self, seconds: float, told: Callable[[float], None], clock: Clock = time.perf_counter
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._start_s = clock()
        self._told = told

    @property
    def left_s(self) -> float:
        return max(0.0, self._seconds - self.taken_s)

    @property
    def taken_s(self) -> float:
        return self._clock() - self._start_s

    def rounds(self, at_most: int) -> Iterator[int]:
        """0, 1, … for each round that fits; the first is always there."""
        slowest_s = 0.0
        for number in range(at_most):
            if number and slowest_s > self.left_s:
                return
            start_s = self._clock()
            yield number
            slowest_s = max(slowest_s, self._clock() - start_s)
            self._told(min(1.0, max(self.taken_s / (self._seconds or 1), (number + 1) / at_most)))

    def end(self) -> None:
        self._told(1.0)
