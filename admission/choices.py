"""Policies by name, for settings and the command line."""

from collections.abc import Callable

from .always import Always
from .arc import Arc
from .base import AdmissionPolicy
from .gated import Gated
from .gdsf import Gdsf
from .lfu import Lfu
from .s3fifo import S3Fifo
from .slru import Slru


def learned() -> AdmissionPolicy:
    """The default."""
    from .learned.policy import Learned  # compiles: only who uses it waits for that

    return Learned()


POLICIES: dict[str, Callable[[], AdmissionPolicy]] = {
    "arc": Arc,
    "gated": Gated,
    "gdsf": Gdsf,
    "learned": learned,
    "lfu": Lfu,
    "lru": Always,
    "s3fifo": S3Fifo,
    "slru": Slru,
}


def make(name: str) -> AdmissionPolicy:
    """A new policy; ValueError when there is none of that name."""
    if name not in POLICIES:
        raise ValueError(f"policy is {name!r}, must be one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
