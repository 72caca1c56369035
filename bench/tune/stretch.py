"""A stretch of a progress bar, which may be split among the parts of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

Progress = Callable[[int, int], None]
"""Told what is done and what there is in all."""

STEPS = 1_000_000
"""Of a whole bar."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """From step `first` to step `last` of `progress`."""

    progress: Progress
    first: float = 0
    last: float = STEPS

    def __call__(self, done: int, total: int) -> None:
        """So much of this stretch is done."""
        here = self.first + (self.last - self.first) * done / max(total, 1)
        self.progress(int(here), STEPS)

    def split(self, count: int) -> list[Stretch]:
        """So many of equal length, one after the other."""
        step = (self.last - self.first) / count
        ends = [self.first + index * step for index in range(count + 1)]
        return [Stretch(self.progress, start, end) for start, end in pairwise(ends)]
