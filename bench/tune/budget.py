"""How much may be written to NVMe: what the user says, as what a replay can count."""

from __future__ import annotations

from dataclasses import dataclass

from .device import Device
from .models import ModelShape
from .trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What may be written to NVMe: chunks per chunk reference, or times the drives' size a day.
    One of the two."""

    writes_per_ref: float | None = None
    drive_writes_per_day: float | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """ "0.15" chunks per reference, or "1DWPD"; ValueError otherwise."""
        number = text.upper().removesuffix("DWPD")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not 0 < value < float("inf"):
            wanted = 'chunk writes per reference such as "0.15", or drive writes a day, "1DWPD"'
            raise ValueError(f"--write-budget is {text!r}, must be {wanted}")
        if number == text.upper():
            return cls(writes_per_ref=value)
        return cls(drive_writes_per_day=value)

    def of(self, trace: Trace, model: ModelShape, device: Device) -> float | None:
        """Chunk writes per reference of this trace; None without a budget."""
        if self.drive_writes_per_day is None:
            return self.writes_per_ref
        one_chunk = model.chunk_bytes(trace.chunk_tokens)
        if not trace.duration_s:
            raise ValueError(f"{trace.name} has no duration: give --write-budget per reference")
        one_a_day = device.nvme_writes_per_day(one_chunk * trace.refs, trace.duration_s)
        return self.drive_writes_per_day / one_a_day


NO_BUDGET = Budget()
