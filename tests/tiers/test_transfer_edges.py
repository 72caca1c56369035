"""Every order that transfers rely on is necessary: without it, a toy device finds a schedule on
which somebody reads or writes too early. With all of them there is none.

An edge is (who waits, the event waited for). A scene is run once to see its edges, then without
each of them in turn. The order within a lane, which is no wait, is taken away in tests of its own.
"""

import ast
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rootcellar.tiers import batches, movers, planes, transfer
from rootcellar.tiers.device import Event
from rootcellar.tiers.movers import ChunkCopy, Lane
from rootcellar.tiers.toy_device import Choose, ToyDevice, ToyEvent, ToyStream, ToyWait
from rootcellar.tiers.transfer import CopyJob, Transfer

from .toy_engine import LAYERS, ROW_BYTES, Race, ToyEngine, expect, set_mover, small_limits

MOVERS = ["in place", "staged", "batched"]
Edge = tuple[str, str]
KINDS: set[Edge] = {
    ("write lane", "compute"),  # the KV must be written
    ("write lane", "forward"),
    ("load lane", "compute"),  # kernels may still read and write the pages
    ("load lane", "forward"),
    ("compute", "load lane"),  # attention reads what was loaded
    ("caller asks", "write lane"),  # then slots can be read, and pages written
    ("caller asks", "load lane"),  # then slots can be written, and pages used
    ("caller blocks", "write lane"),
    ("caller blocks", "load lane"),
}
SITES = Counter(
    {
        ("CopyJob.done", "query"): 1,
        ("CopyJob.wait_for_layer", "hold_compute"): 1,
        ("Transfer._take_back", "wait"): 1,  # after a failure
        ("Transfer.poll", "query"): 1,  # for the bound alone: orders nothing
        ("Transfer.wait", "synchronize"): 1,
        ("Transfer.close", "wait"): 1,
        ("Transfer._launch", "wait"): 1,
    }
)
"""Where the code waits, or asks whether it must."""
WAITING = {"wait", "wait_for_layer", "hold_compute", "synchronize", "query"}


@pytest.fixture(autouse=True)
def _small_limits() -> Iterator[None]:
    logging.disable()  # stores are given up by the thousand here
    with small_limits():
        yield
    logging.disable(logging.NOTSET)


@dataclass
class Faults:
    """What a device leaves out."""

    edge: Edge | None = None
    torn: int | None = None
    """Every so many launches of a lane, its order is lost."""
    early_ends: bool = False
    """Events are past before the last launch before them is."""


class EdgedDevice(ToyDevice):
    """Knows every edge that it was asked for."""

    def __init__(self, choose: Choose, faults: Faults) -> None:
        super().__init__(choose)
        self.faults = faults
        self.edges = set[Edge]()
        self.compute = EdgedStream(self, False, "compute")
        self.forward = EdgedStream(self, False, "forward")
        self.streams = list[ToyStream]([self.compute, self.forward])

    def stream(self, *, urgent: bool) -> ToyStream:
        side = "load lane" if urgent else "write lane"
        self.streams.append(EdgedStream(self, urgent, f"{side} {len(self.streams)}"))
        return self.streams[-1]

    def has(self, waiter: str, event: "EdgedEvent") -> bool:
        edge = waiter, event.name
        self.edges.add(edge)
        return edge != self.faults.edge


class EdgedEvent(ToyEvent):
    def __init__(self, device: EdgedDevice, name: str) -> None:
        super().__init__(device)
        self.edged = device
        self.name = name

    def query(self) -> bool:
        return super().query() or not self.edged.has("caller asks", self)

    def synchronize(self) -> None:
        if self.edged.has("caller blocks", self):
            super().synchronize()


class EdgedStream(ToyStream):
    def __init__(self, device: EdgedDevice, urgent: bool, name: str) -> None:
        super().__init__(device, urgent)
        self.edged = device
        self.name = name
        self.num_events = 0
        self.num_launches = 0
        self.waits = list[ToyWait]()

    def wait(self, event: Event) -> None:
        assert isinstance(event, EdgedEvent)
        if self.edged.has(self.name, event):
            super().wait(event)
            self.waits.append(ToyWait(event))

    def record(self) -> ToyEvent:
        event = EdgedEvent(self.edged, f"{self.name} #{self.num_events}")
        self.num_events += 1
        early = self.edged.faults.early_ends and "lane" in self.name
        after_work = bool(self.queue) and callable(self.queue[-1])
        self.queue.insert(len(self.queue) - (early and after_work), event)
        return event

    def run(self, work: Callable[[], None]) -> None:
        torn = self.edged.faults.torn
        if torn is None or "lane" not in self.name:
            super().run(work)
            return
        if self.num_launches % torn == 0:
            self.edged.streams.append(ToyStream(self.edged, self.urgent))
            self.edged.streams[-1].queue.extend(self.waits)
        self.num_launches += 1
        self.edged.streams[-1].run(work)
        super().wait(self.edged.streams[-1].record())


class Scene:
    """An engine that stores some pages and loads others, each chunk with pages of both streams, and
    keeps its promises."""

    def __init__(
        self, device: EdgedDevice, mover: str, *, chunks: int = 2, rows: int = 1, bound: int = 4096
    ) -> None:
        set_mover(device, mover)
        self.device = device
        self.engine = ToyEngine(device)
        self.transfer = Transfer(device, staging_bytes=rows * ROW_BYTES, in_flight_bytes=bound)
        self.stored = [[n, 8 + n] for n in range(chunks)]
        self.loaded = [[4 + n, 12 + n] for n in range(chunks)]
        self.chunks = list[bytes]()
        for slot in range(len(self.engine.slots)):
            self.engine.slots[slot] = torch.arange(len(self.engine.slots[slot])) + slot

    def store(self) -> CopyJob:
        """As soon as the kernels that write the pages are launched."""
        self.write(self.stored, seed=1)
        self.chunks = [self.engine.chunk(pages) for pages in self.stored]
        return self.transfer.store(self.copies(self.stored, 0), [self.device.forward.record()])

    def load(self, *, by_layer: bool = False) -> CopyJob:
        """As soon as the kernels that use the pages are launched."""
        self.write(self.loaded, seed=2)
        self.read(self.loaded)
        copies = self.copies(self.loaded, len(self.stored))
        job = self.transfer.load(copies, [self.device.forward.record()], by_layer=by_layer)
        for slot, pages in enumerate(self.loaded, len(self.stored)):
            self.engine.load_model(pages, self.engine.slot(slot))
        return job

    def attend(self, job: CopyJob) -> None:
        for layer in range(LAYERS):
            job.wait_for_layer(layer)
            every = [page for pages in self.loaded for page in pages]
            self.engine.read(every, layers=slice(layer, layer + 1))

    def take_back_stored(self) -> None:
        for slot, chunk in enumerate(self.chunks):
            expect(self.engine.slot(slot), chunk, "slots")
        self.write(self.stored, seed=3)

    def take_back_loaded(self) -> None:
        self.engine.slots[len(self.stored) :] = 0xFF
        self.read(self.loaded)

    def poll_until_done(self, stored: CopyJob, loaded: CopyJob) -> None:
        left = {stored: self.take_back_stored, loaded: self.take_back_loaded}
        while left:
            for job in self.transfer.poll():
                left.pop(job)()
            self.device.step()

    def end(self) -> None:
        self.device.drain()
        for slot, chunk in enumerate(self.chunks):
            expect(self.engine.slot(slot), chunk, "slots")
        expect(self.engine.pages.tobytes(), self.engine.model.tobytes(), "pages")

    def write(self, chunks: Sequence[Sequence[int]], seed: int) -> None:
        self.engine.write([pages[0] for pages in chunks], seed)
        self.engine.write([pages[1] for pages in chunks], seed + 10, self.device.forward)

    def read(self, chunks: Sequence[Sequence[int]]) -> None:
        self.engine.read([pages[0] for pages in chunks])
        self.engine.read([pages[1] for pages in chunks], self.device.forward)

    def copies(self, chunks: Sequence[Sequence[int]], slot: int) -> list[ChunkCopy]:
        return [self.engine.copy(pages, slot + n) for n, pages in enumerate(chunks)]


def polls(device: EdgedDevice, mover: str) -> None:
    scene = Scene(device, mover)
    scene.poll_until_done(scene.store(), scene.load())
    scene.end()


def polls_with_stores_that_queue(device: EdgedDevice, mover: str) -> None:
    scene = Scene(device, mover, bound=1)
    scene.poll_until_done(scene.store(), scene.load())
    scene.end()


def blocks(device: EdgedDevice, mover: str) -> None:
    scene = Scene(device, mover)
    stored, loaded = scene.store(), scene.load()
    scene.transfer.wait([loaded])
    scene.take_back_loaded()
    scene.transfer.wait([stored])
    scene.take_back_stored()
    scene.end()


def closes(device: EdgedDevice, mover: str) -> None:
    scene = Scene(device, mover)
    scene.store()
    scene.load()
    scene.transfer.close()
    scene.take_back_stored()
    scene.take_back_loaded()
    scene.end()


def attends_layer_by_layer(device: EdgedDevice, mover: str) -> None:
    scene = Scene(device, mover)
    scene.attend(scene.load(by_layer=True))
    scene.end()


def has_a_load_refused(device: EdgedDevice, _: str) -> None:
    scene = Scene(device, "in place", rows=2)
    device.launches_left = 5  # of the engine's four, and of two copies
    with pytest.raises(RuntimeError, match="refuses"):
        scene.load()
    device.launches_left = None
    scene.engine.slots[:] = 0xFF
    scene.write(scene.loaded, seed=4)
    scene.end()


def has_a_store_refused(device: EdgedDevice, _: str) -> None:
    scene = Scene(device, "in place", rows=2)
    device.launches_left = 3  # of the engine's two, and of two copies
    job = scene.store()
    device.launches_left = None
    while job not in scene.transfer.poll():
        device.step()
    scene.chunks = [b"\xff" * len(chunk) for chunk in scene.chunks]
    scene.engine.slots[:] = 0xFF
    scene.end()


def reuses_buffers(device: EdgedDevice, mover: str) -> None:
    scene = Scene(device, mover, chunks=4)
    scene.poll_until_done(scene.store(), scene.load())
    scene.end()


SceneRun = Callable[[EdgedDevice, str], None]
SCENES: dict[str, SceneRun] = {
    scene.__name__: scene
    for scene in (
        polls,
        blocks,
        closes,
        attends_layer_by_layer,
        has_a_load_refused,
        has_a_store_refused,
    )
}


def _engine_first(count: int) -> int:
    return 0


def _transfers_first(count: int) -> int:
    return count - 1


def _either(random: Random, count: int) -> int:
    """One of the two, which strays further than any stream would."""
    return random.choice((0, count - 1))


def schedules() -> Iterator[Choose]:
    yield from (_engine_first, _transfers_first)
    for seed in range(100):
        yield partial(_either, Random(seed))
        yield Random(seed).randrange


def races(scene: SceneRun, mover: str, faults: Faults) -> bool:
    """Whether some schedule shows one."""
    for choose in schedules():
        try:
            scene(EdgedDevice(choose, faults), mover)
        except Race:
            return True
    return False


def edges_of(scene: SceneRun, mover: str) -> set[Edge]:
    device = EdgedDevice(_engine_first, Faults())
    scene(device, mover)
    return device.edges


def _kind(edge: Edge) -> Edge:
    waiter, event = edge
    return " ".join(waiter.split()[:2]), " ".join(event.split(" #")[0].split()[:2])


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("scene", [*SCENES, "polls_with_stores_that_queue", "reuses_buffers"])
@given(random=st.randoms(use_true_random=False))
def test_with_every_edge_there_is_no_race(scene: str, mover: str, random: Random) -> None:
    globals()[scene](EdgedDevice(random.randrange, Faults()), mover)


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("scene", SCENES)
def test_without_any_one_edge_there_is_a_race(scene: str, mover: str) -> None:
    run = SCENES[scene]
    edges = edges_of(run, mover)
    if run is has_a_store_refused:  # what it still copies is right for nobody
        edges = {(waiter, event) for waiter, event in edges if waiter == "caller asks"}
    assert edges
    needless = [edge for edge in edges if not races(run, mover, Faults(edge))]
    assert needless == []


@pytest.mark.parametrize("mover", MOVERS)
def test_no_lane_waits_twice_for_an_event(mover: str) -> None:
    device = EdgedDevice(_engine_first, Faults())
    reuses_buffers(device, mover)
    for stream in device.streams:
        assert isinstance(stream, EdgedStream)
        events = [id(wait.event) for wait in stream.waits]
        assert len(events) == len(set(events))


def test_the_list_of_edges_is_complete() -> None:
    kinds = {_kind(edge) for scene in SCENES.values() for edge in edges_of(scene, "staged")}
    assert kinds == KINDS


def test_the_list_of_places_that_wait_is_complete() -> None:
    modules = (transfer, movers, batches, planes)
    assert Counter(call for module in modules for call in _waiting_calls(module)) == SITES


def test_a_store_that_has_batches_to_launch_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def done(job: CopyJob) -> bool:
        return all(part.end.query() for part in job.launched)

    monkeypatch.setattr(CopyJob, "done", property(done))
    for mover in MOVERS:
        assert races(polls_with_stores_that_queue, mover, Faults())


def test_the_halves_of_a_staged_copy_must_be_in_order() -> None:
    assert races(reuses_buffers, "staged", Faults(torn=1))
    assert not races(reuses_buffers, "batched", Faults(torn=1))


def test_a_buffer_is_filled_again_only_when_the_copy_before_is_out_of_it() -> None:
    assert races(reuses_buffers, "staged", Faults(torn=2))
    assert not races(polls, "staged", Faults(torn=2))  # which uses each buffer once


def test_a_buffer_belongs_to_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = torch.empty(ROW_BYTES, dtype=torch.uint8)

    def rows(lane: Lane, num_rows: int, size_bytes: int) -> torch.Tensor:
        return shared[None, :size_bytes]

    monkeypatch.setattr(Lane, "rows", rows)
    assert races(polls, "staged", Faults())


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("scene", [polls, blocks, closes, attends_layer_by_layer])
def test_the_end_of_a_batch_comes_after_all_its_copies(scene: SceneRun, mover: str) -> None:
    assert races(scene, mover, Faults(early_ends=True))


def _waiting_calls(module: ModuleType) -> Iterator[tuple[str, str]]:
    """(where, method) of everything that waits, or asks whether it must."""
    return _calls_in(ast.parse(Path(str(module.__file__)).read_text()), ())


def _calls_in(node: ast.AST, scope: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Attribute) and child.attr in WAITING:
            yield ".".join(scope), child.attr
        inner = (child.name,) if isinstance(child, ast.ClassDef | ast.FunctionDef) else ()
        yield from _calls_in(child, (*scope, *inner))
