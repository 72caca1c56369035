"""The vocabulary of the device check: what a section is given, and what it hands back."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import torch

from .device_budget import Part
from .device_scale import Scale

Row = dict[str, Any]
"""One line of a section's table, ready for JSON; all rows of a section have the same names."""


class Bound(StrEnum):
    AT_LEAST = ">="
    AT_MOST = "<="


class Verdict(StrEnum):
    MET = "met"
    MISSED = "missed"
    NOT_JUDGED = "not judged"
    """A dry run: its speeds say nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio to a yardstick of the same rounds, and what it should be."""

    what: str
    measured: float
    bound: Bound
    limit: float

    def verdict(self, *, dry_run: bool) -> Verdict:
        if dry_run:
            return Verdict.NOT_JUDGED
        at_least = self.bound is Bound.AT_LEAST
        fine = self.measured >= self.limit if at_least else self.measured <= self.limit
        return Verdict.MET if fine else Verdict.MISSED

    def as_row(self, *, dry_run: bool) -> Row:
        return asdict(self) | {"verdict": self.verdict(dry_run=dry_run)}


@dataclass(slots=True)
class Findings:
    """What a section found out.

    skipped: why there is nothing to find out on this machine.
    wrong: what must never be, such as bytes that differ; one is enough to fail the section.
    """

    rows: list[Row] = field(default_factory=list[Row])
    targets: list[Target] = field(default_factory=list[Target])
    notes: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])
    skipped: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Where and how a section measures. directory: for files, the section's to remove again."""

    device: torch.device
    directory: Path
    seed: int
    scale: Scale

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def generator(self) -> torch.Generator:
        """Of numbers on the device, the same in every run."""
        return torch.Generator(self.device).manual_seed(self.seed)


class Section(Protocol):
    """Measures within its part of the budget. Whatever it raises fails this section alone."""

    def __call__(self, site: Site, part: Part, /) -> Findings: ...


def compared(name: str, ratios: Sequence[float]) -> Row:
    """The median over rounds of a ratio to the same round's yardstick, and its spread."""
    return {
        name: statistics.median(ratios),
        f"{name}_min": min(ratios),
        f"{name}_max": max(ratios),
        "rounds": len(ratios),
    }


def quotients(samples: Sequence[float], yardstick: Sequence[float]) -> list[float]:
    """Yardstick time / time, round by round: how fast, where the yardstick is 1."""
    return [y / s for s, y in zip(samples, yardstick, strict=True)]
