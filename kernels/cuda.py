"""Gather and scatter in GPU memory: one upload of numbers and one launch per copy.

Both go to torch's current stream, and nothing waits. Copies on other streams share no memory.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .compile import import_cupy, kernel
from .launch import Launch, plan
from .page_copy import PageCopy

_BLOCKS_PER_SM = 8
"""Enough to fill a device; each then takes several turns."""


def gather(copy: PageCopy) -> None:
    _launch_copy("gather", copy)


def scatter(copy: PageCopy) -> None:
    _launch_copy("scatter", copy)


def launch(source: str, name: str, device: torch.device, planned: Launch) -> None:
    """Upload what is planned and start the kernel `name` of csrc/`source` behind it."""
    index = device_index(device)
    with torch.cuda.device(index):
        # torch's allocator of pinned memory keeps the words until this upload is done.
        host = torch.from_numpy(planned.words).pin_memory()
        # Of this stream's memory: what uses it next comes behind the kernel.
        words = host.to(f"cuda:{index}", non_blocking=True)
        arguments = planned.arguments(words.data_ptr())
        start(source, name, index, planned.grid, planned.block, arguments)


def start(
    source: str, name: str, index: int, grid: int, block: int, arguments: tuple[int, ...]
) -> None:
    """Start a kernel on torch's current stream of device `index`. arguments: all of 64 bits."""
    cupy = import_cupy()
    stream = _stream(cupy, torch.cuda.current_stream(index).cuda_stream, index)
    function = kernel(source, name, index)
    with cupy.cuda.Device(index), stream:
        function((grid,), (block,), tuple(map(cupy.uint64, arguments)))


def device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@dataclass(frozen=True, slots=True)
class _Handle:
    """A stream, in the protocol by which CUDA libraries hand one to each other."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _stream(cupy: Any, handle: int, index: int) -> Any:
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Handle(handle))
    return cupy.cuda.ExternalStream(handle, index)  # before CuPy 14


def _launch_copy(name: str, copy: PageCopy) -> None:
    device = copy.kv.device
    blocks = _multiprocessors(device_index(device)) * _BLOCKS_PER_SM
    launch("copy.cu", name, device, plan(copy, most_blocks=blocks))


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
