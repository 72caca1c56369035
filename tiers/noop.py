"""The tier below DRAM when there is none: holds nothing, accepts nothing, is always idle."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from ..admission.base import Chain, EvictionOrder, Key
from .dram import DramChunk
from .nvme import Planned, ReadDone, WriteDone


class NoNvme:
    present = False
    io_alive = True
    jobs_in_flight = 0
    free_bytes = 0

    def holds(self, key: Key) -> bool:
        return False

    def expects(self, key: Key) -> bool:
        return False

    def readable_keys(self) -> Iterator[Key]:
        return iter(())

    def describe(self, key: Key) -> NoReturn:
        raise AssertionError("nothing is here")

    def touch(self, chain: Chain, stop: int, *, hits: int) -> None:
        pass

    def plan_read(self, key: Key, slot: int) -> bool:
        return False

    def plan_write(
        self, chunk: DramChunk, payload_bytes: int, worth: float | None = None
    ) -> Planned:
        return Planned.NO

    @contextmanager
    def kept(self, keys: Sequence[Key]) -> Iterator[None]:
        yield

    def submit(self) -> None:
        pass

    def poll(self) -> list[ReadDone | WriteDone]:
        return []

    def wait(self, timeout_s: float) -> None:
        pass

    def invalidate(self, order: EvictionOrder, successor: bytes) -> None:
        pass

    def stats(self) -> None:
        return None

    def check_integrity(self) -> None:
        pass
