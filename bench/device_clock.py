"""How long work on a device takes: as the device sees it, and as whoever asked for it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], object]
"""Launches something on the current stream."""

_cuda: Any = torch.cuda  # which is typed in parts only


def device_s(device: torch.device, work: Work, repeats: int = 1) -> float:
    """Seconds per call between two events around `repeats` calls in a row, behind one that keeps
    the device busy while the first of them is prepared."""
    if device.type == "cpu":
        return wall_s(device, lambda: [work() for _ in range(repeats)]) / repeats
    start, end = (_cuda.Event(enable_timing=True) for _ in range(2))
    work()
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / repeats


def wall_s(device: torch.device, work: Work) -> float:
    """Seconds from an idle device to an idle device."""
    synchronize(device)
    start_s = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start_s


def launch_s(device: torch.device, work: Work) -> float:
    """Seconds until the call returns, which on a GPU is before the work is done."""
    synchronize(device)
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def synchronize(device: torch.device) -> None:
    """Wait for all streams."""
    if device.type == "cuda":
        _cuda.synchronize(device)
