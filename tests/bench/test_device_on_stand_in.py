"""The lines of the device check that only a GPU reaches, on a stand-in for torch.cuda that notes
what is asked of it, and in which order."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rootcellar.bench import (
    device_check,
    device_clock,
    device_codes,
    device_decode,
    device_facts,
    device_memcheck,
    device_slots,
)
from rootcellar.bench.device_budget import Part
from rootcellar.bench.device_decode import DecodeLoop
from rootcellar.bench.device_scale import DRY, FULL
from rootcellar.bench.device_section import Site
from rootcellar.kernels import PagedKV
from rootcellar.kernels.fp8 import gather_fp8

GPU = torch.device("cuda", 0)
PCI_ADDRESS = "0000:0f:00.0"


@dataclass
class Cuda:
    """torch.cuda, as far as the device check uses it by itself."""

    asked: list[str] = field(default_factory=list[str])
    stream_name: str = "engine"
    streams_made: int = 0
    free_bytes: int = 0

    def note(self, what: str) -> None:
        self.asked.append(f"{self.stream_name}: {what}")

    def synchronize(self, device: torch.device) -> None:
        self.note("wait for all streams")

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        return SimpleNamespace(
            record=lambda: self.note("event"),
            synchronize=lambda: self.note("wait for event"),
            elapsed_time=lambda end: 12.0,
        )

    def Stream(self) -> Any:
        self.streams_made += 1
        return self._stream(f"side {self.streams_made}")

    def current_stream(self) -> Any:
        return self._stream(self.stream_name)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.stream_name = self.stream_name, stream.name
        yield
        self.stream_name = before

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.note("replay"))

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        before, self.stream_name = self.stream_name, "capture"
        yield
        self.stream_name = before

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free_bytes, 2 * self.free_bytes

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(
            name="Stand-in", total_memory=1 << 37, major=9, minor=0, multi_processor_count=132
        )

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.asked.append(f"{name}: after {other.name}"),
            synchronize=lambda: self.asked.append(f"{name}: wait for it"),
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    for module in (device_clock, device_decode, device_facts):
        monkeypatch.setattr(module, "_cuda", cuda)
    return cuda


def site_on_cpu() -> Site:
    return Site(device=torch.device("cpu"), directory=Path(), seed=0, scale=DRY)


def test_device_time_is_between_events_behind_one_call_and_waits_for_the_last_event(
    cuda: Cuda,
) -> None:
    seconds = device_clock.device_s(GPU, lambda: cuda.note("work"), repeats=3)
    assert seconds == pytest.approx(0.004)
    assert cuda.asked == [
        f"engine: {what}"
        for what in ("work", "event", "work", "work", "work", "event", "wait for event")
    ]


def test_wall_time_begins_and_ends_with_all_streams_idle_and_launch_time_only_begins_so(
    cuda: Cuda,
) -> None:
    assert device_clock.wall_s(GPU, lambda: cuda.note("work")) > 0
    assert device_clock.launch_s(GPU, lambda: cuda.note("work")) > 0
    idle, work = "engine: wait for all streams", "engine: work"
    assert cuda.asked == [idle, work, idle, idle, work]


def test_a_decode_step_is_captured_after_warm_ups_that_nothing_overtakes(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = DecodeLoop(DRY.decode, torch.Generator().manual_seed(0))
    monkeypatch.setattr(loop, "_eager", lambda: cuda.note("step"))
    loop._captured().replay()
    assert cuda.asked == [
        "side 1: after engine",
        *["side 1: step"] * 3,
        "engine: after side 1",
        "capture: step",
        "engine: replay",
    ]


def test_a_decode_loop_waits_for_its_own_stream_alone(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = DecodeLoop(DRY.decode, torch.Generator().manual_seed(0))
    loop.wait()
    assert not cuda.asked
    monkeypatch.setattr(loop, "_on_gpu", True)
    loop.wait()
    assert cuda.asked == ["engine: wait for it"]


@pytest.mark.parametrize("num_layers", [1, 7, 32])
def test_a_decode_loop_takes_half_of_the_memory_at_most(num_layers: int, cuda: Cuda) -> None:
    shape = FULL.decode
    loop = DecodeLoop(DRY.decode, torch.Generator().manual_seed(0))
    tensors = [value for value in vars(loop._layers[0]).values() if torch.is_tensor(value)]
    in_float32 = sum(tensor.nbytes for tensor in tensors)
    assert device_decode._layer_bytes(DRY.decode) == in_float32 // 2
    cuda.free_bytes = 2 * num_layers * device_decode._layer_bytes(shape)
    assert device_decode._fitting(shape, GPU).num_layers == num_layers
    cuda.free_bytes -= 2
    assert device_decode._fitting(shape, GPU).num_layers == max(1, num_layers - 1)


@dataclass
class Runtime:
    """CUDA's page locking, which answers `code`."""

    code: int = 0
    held: list[int] = field(default_factory=list[int])

    def register(self, address: int, size_bytes: int, /) -> int:
        if not self.code:
            self.held.append(address)
        return self.code

    def unregister(self, address: int, /) -> int:
        self.held.remove(address)
        return 0

    def describe(self, code: int, /) -> str:
        return f"error {code}"


def test_slots_are_pinned_for_the_gpu_and_unpinned_when_they_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(device_slots, "TorchRuntime", lambda device: runtime)
    with device_slots.slots(GPU, 5000) as memory:
        assert runtime.held == [memory.data_ptr()]
        assert memory.shape == (5000,)
    assert not runtime.held


def test_slots_that_cannot_be_pinned_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_slots, "TorchRuntime", lambda device: Runtime(code=2))
    with (
        pytest.raises(OSError, match="5000 bytes cannot be pinned"),
        device_slots.slots(GPU, 5000),
    ):
        pass


def test_what_is_known_of_a_gpu_can_be_written_as_json(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "580.159.04, 5, 16, 700.00 W, Enabled"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(device_facts, "current_pci_address", lambda: PCI_ADDRESS)
    found = json.loads(json.dumps(device_facts.facts(GPU), allow_nan=False))
    assert found["device"] == "Stand-in"
    assert found["compute_capability"] == "9.0"
    assert found["nvidia_smi"]["driver_version"] == "580.159.04"
    assert found["nvidia_smi"]["ecc.mode.current"] == "Enabled"


@pytest.mark.parametrize("script", ["exit 6", "kill -9 $$", None])
def test_a_gpu_whose_tool_tells_nothing_is_measured_all_the_same(
    script: str | None, cuda: Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if script is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(device_facts, "current_pci_address", lambda: None)
    assert device_facts.facts(GPU)["nvidia_smi"] == {}


def test_a_section_begins_with_the_memory_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emptied = list[bool]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    site = Site(device=GPU, directory=Path(), seed=0, scale=DRY)
    device_check._release(site)
    assert emptied == [True]


def test_what_the_sanitizer_runs_ends_well_if_all_bytes_are_right_and_names_those_that_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def on_cpu(*, dry_run: bool) -> torch.device:
        assert not dry_run
        return torch.device("cpu")

    monkeypatch.setattr(device_memcheck, "device_to_measure", on_cpu)
    assert device_memcheck.main() == 0
    monkeypatch.setattr(device_codes, "xxh3_128", lambda rows: torch.zeros((len(rows), 16)))
    assert device_memcheck.main() == 1
    assert "differs: xxh3: rows of 241 bytes" in capsys.readouterr().out


def test_a_kernel_that_makes_small_numbers_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def flushing(kv: PagedKV, pages: Any, chunks: torch.Tensor, **how: Any) -> None:
        assert kv.dtype is not None
        states = kv.planes[0].view(kv.dtype)
        small = states.float().abs() < torch.finfo(torch.float32).tiny
        flushed = torch.where(small, states * 0, states)  # which keeps the sign
        gather_fp8(PagedKV((flushed.view(torch.uint8),), dtype=kv.dtype), pages, chunks, **how)

    monkeypatch.setattr(device_codes, "gather_fp8", flushing)
    found = device_codes.measure(site_on_cpu(), Part(60, lambda fraction: None))
    assert found.wrong == ["gather_fp8: bfloat16", "gather_fp8: float32"]
