"""The host's part of a launch, by stand-ins for torch.cuda and CuPy; the kernels themselves run on
the CPU, so what comes out can be compared."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from rootcellar.kernels import (
    PagedKV,
    base,
    cpu_fp8,
    cuda,
    cuda_fp8,
    cuda_xxh3,
    fp8,
    gather,
    scatter,
)
from rootcellar.kernels import compile as compiling
from rootcellar.kernels.compile import OPTIONS, import_cupy, kernel, source_text
from rootcellar.kernels.fp8 import fp8_chunk_bytes, gather_fp8, scatter_fp8

from .emulation import emulated

DEVICE = 1
STREAM = 0x5EED
_SOURCES = ("copy.cu", "fp8.cu", "xxh3.cu")
_PAGES = [4, 0, 5, 2]


@dataclass
class Gpu:
    """What was asked of torch.cuda and of CuPy, in order."""

    asked: list[object] = field(default_factory=list[object])
    torch_device: int = 0
    cupy_device: int = 0
    stream: int = 0
    uploads: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    compiled: list[tuple[str, tuple[str, ...], int]] = field(
        default_factory=list[tuple[str, tuple[str, ...], int]]
    )

    @contextmanager
    def entered(self, name: str, value: int) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        yield
        setattr(self, name, before)


@dataclass
class Function:
    gpu: Gpu
    source: str
    name: str

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[np.generic, ...]
    ) -> None:
        """CuPy packs a number as wide as it is, and all parameters of our kernels have 64 bits."""
        assert all(number.dtype == np.uint64 for number in args)
        gpu = self.gpu
        gpu.asked.append(("launch", self.name, gpu.torch_device, gpu.cupy_device, gpu.stream))
        (one,), (threads,) = grid, block
        emulated(self.source).launch(self.name, one, threads, *map(int, args))


def _cupy(gpu: Gpu, *, before_14: bool = False) -> Any:
    """The parts of CuPy that are used, with its signatures."""

    class Module:
        def load(self, cubin: bytes) -> None:
            self._source = cubin.decode()

        def get_function(self, name: str) -> Function:
            return Function(gpu, self._source, name)

    def compile_using_nvrtc(
        source: str, options: tuple[str, ...] = (), *, cache_in_memory: bool = False
    ) -> tuple[bytes, None]:
        assert cache_in_memory, "it would write a file"
        name = next(name for name in _SOURCES if source_text(name) == source)
        gpu.compiled.append((name, options, gpu.cupy_device))
        return name.encode(), None

    class Stream:
        if not before_14:

            @staticmethod
            def from_external(given: Any) -> Any:
                version, handle = given.__cuda_stream__()
                assert version == 0
                return gpu.entered("stream", handle)

    def external_stream(handle: int, device: int) -> Any:
        assert before_14, "it warns that it is deprecated"
        assert device == DEVICE
        return gpu.entered("stream", handle)

    return SimpleNamespace(
        uint64=np.uint64,
        cuda=SimpleNamespace(
            Device=lambda index: gpu.entered("cupy_device", index),
            Stream=Stream,
            ExternalStream=external_stream,
            Module=Module,
            compiler=SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc),
        ),
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Memory of the CPU stands for that of device 1, which is current."""
    gpu = Gpu()

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        gpu.asked.append("pin")
        return tensor.clone()

    def to(tensor: torch.Tensor, device: str, *, non_blocking: bool) -> torch.Tensor:
        gpu.asked.append(("upload", device, non_blocking, gpu.torch_device))
        gpu.uploads.append(tensor.clone())
        return gpu.uploads[-1]

    def current_stream(index: int) -> SimpleNamespace:
        assert index == DEVICE
        return SimpleNamespace(cuda_stream=STREAM)

    asked = {
        "device": lambda index: gpu.entered("torch_device", index),
        "current_device": lambda: DEVICE,
        "current_stream": current_stream,
        "get_device_properties": lambda index: SimpleNamespace(multi_processor_count=2),
    }
    for name, stand_in in asked.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(base, "_backend", lambda device: cuda)
    monkeypatch.setattr(fp8, "_backend", lambda device: cuda_fp8)
    monkeypatch.setitem(sys.modules, "cupy", _cupy(gpu))
    yield gpu
    for known in (kernel, compiling._module, cuda._multiprocessors):
        known.cache_clear()


def _noise(*shape: int) -> torch.Tensor:
    generator = np.random.default_rng(0)
    return torch.from_numpy(generator.integers(0, 256, shape, np.uint8))


def test_numbers_go_up_from_pinned_memory_and_the_kernel_follows_on_torchs_stream(gpu: Gpu) -> None:
    kv, chunks = PagedKV.of_rows([_noise(6, 48)]), torch.zeros((2, 96), dtype=torch.uint8)
    gather(kv, _PAGES, chunks, pages_per_chunk=2)
    assert gpu.asked == [
        "pin",
        ("upload", f"cuda:{DEVICE}", True, DEVICE),
        ("launch", "gather", DEVICE, DEVICE, STREAM),
    ]
    assert (gpu.torch_device, gpu.cupy_device, gpu.stream) == (0, 0, 0)


def test_gather_and_scatter_move_every_byte(gpu: Gpu) -> None:
    planes = [_noise(6, 48), _noise(6, 80)]
    kv, chunks = PagedKV.of_rows(planes), torch.zeros((2, 300), dtype=torch.uint8)
    gather(kv, _PAGES, chunks, pages_per_chunk=2)
    expected = torch.cat([plane[_PAGES].view(2, -1) for plane in planes], dim=1)
    assert torch.equal(chunks[:, :256], expected)
    assert not chunks[:, 256:].any()
    before = [plane.clone() for plane in planes]
    for plane in planes:
        plane[_PAGES] = 0
    scatter(chunks, kv, _PAGES, pages_per_chunk=2)
    assert all(map(torch.equal, planes, before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantised_copies_are_those_of_the_twin(
    dtype: torch.dtype, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn((6, 2, 4, 8), generator=generator).type(dtype)
    kv = PagedKV((states.view(torch.uint8),), dtype=dtype)
    chunks, expected = torch.zeros((2, 2, fp8_chunk_bytes(kv, 2)), dtype=torch.uint8)
    gather_fp8(kv, _PAGES, chunks, pages_per_chunk=2)
    scatter_fp8(chunks, kv, _PAGES, pages_per_chunk=2)
    back = states.clone()
    monkeypatch.setattr(fp8, "_backend", lambda device: cpu_fp8)
    states.copy_(torch.randn(states.shape, generator=generator.manual_seed(0)))
    gather_fp8(kv, _PAGES, expected, pages_per_chunk=2)
    scatter_fp8(expected, kv, _PAGES, pages_per_chunk=2)
    assert torch.equal(chunks, expected)
    assert torch.equal(states, back)


def test_digests_are_those_of_the_package_and_need_no_upload(gpu: Gpu) -> None:
    rows = _noise(3, 3000)
    found = cuda_xxh3.digests(rows)
    assert [row.numpy().tobytes() for row in found] == [
        xxhash.xxh3_128_digest(row.numpy().tobytes()) for row in rows
    ]
    assert gpu.asked == [
        ("launch", name, DEVICE, DEVICE, STREAM) for name in ("xxh3_sums", "xxh3_fold")
    ]


def test_no_rows_have_no_digests(gpu: Gpu) -> None:
    assert cuda_xxh3.digests(_noise(0, 3000)).shape == (0, 16)
    assert not gpu.asked


def test_a_source_is_compiled_once_for_a_device_with_our_options_and_no_others(gpu: Gpu) -> None:
    for name in ("gather", "scatter", "gather"):
        kernel("copy.cu", name, DEVICE)
    kernel("copy.cu", "gather", 0)
    assert gpu.compiled == [("copy.cu", OPTIONS, DEVICE), ("copy.cu", OPTIONS, 0)]


def test_before_cupy_14_a_stream_is_handed_over_as_it_was_then(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", _cupy(gpu, before_14=True))
    chunks = torch.zeros((1, 96), dtype=torch.uint8)
    gather(PagedKV.of_rows([_noise(6, 48)]), [1, 2], chunks, pages_per_chunk=2)
    assert gpu.asked[-1] == ("launch", "gather", DEVICE, DEVICE, STREAM)


def test_a_home_that_cannot_be_written_is_named_with_its_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> Any:
        assert name == "cupy"
        raise PermissionError(13, "Permission denied", "/root/.cupy")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ImportError, match=r"/root/\.cupy.*CUPY_CACHE_DIR"):
        import_cupy()
