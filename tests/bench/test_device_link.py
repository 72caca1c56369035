from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from rootcellar.bench import device_link
from rootcellar.bench.device_budget import Part
from rootcellar.bench.device_link import Direction, Way
from rootcellar.bench.device_scale import DRY
from rootcellar.bench.device_section import Findings, Site
from rootcellar.bench.device_slots import Form, slots
from rootcellar.tiers import movers
from rootcellar.tiers.device import CpuDevice
from rootcellar.tiers.movers import Batch, Lane
from rootcellar.tiers.toy_device import ToyDevice

SIZES = {"CHUNK_BYTES": (64 << 10, 256 << 10), "PAGE_BYTES": (4 << 10, 64 << 10)}
LINK_BYTES = 512 << 10


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sizes in SIZES.items():
        monkeypatch.setattr(device_link, name, sizes)
    monkeypatch.setattr(device_link, "TARGETS", {256 << 10: 0.95})
    monkeypatch.setattr(device_link, "STAGING_BYTES", 512 << 10)


def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, can_batch: bool) -> Findings:
    """On a device whose streams run late, and in any order."""
    toy = ToyDevice(Random(0).randrange, compute="caller", can_batch=can_batch)
    monkeypatch.setattr(device_link, "device_of", lambda tensors: toy)
    return measured_on_cpu(tmp_path)


def measured_on_cpu(tmp_path: Path) -> Findings:
    scale = replace(DRY, link_bytes=LINK_BYTES, most_rounds=2)
    site = Site(device=torch.device("cpu"), directory=tmp_path, seed=0, scale=scale)
    return device_link.measure(site, Part(60, lambda fraction: None))


def test_every_way_of_a_device_is_measured_and_moves_the_right_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = measured(monkeypatch, tmp_path, can_batch=True)
    assert not found.wrong
    assert not found.notes
    assert {(row["way"], row["direction"]) for row in found.rows} == {
        (way, direction) for way in (Way.STAGED, Way.BATCHED) for direction in Direction
    }
    assert len(found.rows) == 4 * 4
    assert all(row["rounds"] == 2 for row in found.rows)


def test_what_transfers_would_choose_is_what_targets_judge(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(movers, "BATCHED_FROM_BYTES", 64 << 10)
    found = measured(monkeypatch, tmp_path, can_batch=True)
    assert all(
        (row["way"] is Way.BATCHED) == (row["page_bytes"] == 64 << 10)
        for row in found.rows
        if row["chosen"]
    )
    assert movers.BATCHED_FROM_BYTES == 64 << 10
    for target, direction in zip(found.targets, Direction, strict=True):
        judged = [
            row["to_plain"]
            for row in found.rows
            if row["chosen"] and row["direction"] is direction and row["chunk_bytes"] == 256 << 10
        ]
        assert len(judged) == 2
        assert target.measured == min(judged)


def test_a_driver_without_batched_copies_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = measured(monkeypatch, tmp_path, can_batch=False)
    assert {row["way"] for row in found.rows} == {Way.STAGED}
    assert found.notes == ["no batched copies: the driver has none"]


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_byte_that_differs_is_found(
    direction: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = getattr(movers.InPlace, direction)

    def broken(self: movers.InPlace, lane: Lane, batch: Batch) -> None:
        real(self, lane, batch)
        last = batch.copies[-1]
        written = last.slot if direction == "store" else last.kv.planes[-1][int(last.pages[-1])]
        written.view(-1)[-1] += 1

    monkeypatch.setattr(movers.InPlace, direction, broken)
    wrong = measured_on_cpu(tmp_path).wrong
    assert wrong
    assert all(f"in place {direction}" in what for what in wrong)


@pytest.mark.parametrize("mover", [movers.Staged, movers.Batched])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_that_does_nothing_is_found(
    mover: type[object], direction: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mover, direction, lambda self, lane, batch: None)
    wrong = measured(monkeypatch, tmp_path, can_batch=True).wrong
    assert len(wrong) == 4
    assert all(what.startswith(f"{mover.__name__.lower()} {direction}") for what in wrong)


def test_a_way_that_copies_do_not_take_is_not_measured_under_its_name() -> None:
    form = Form(64 << 10, 4 << 10)
    memory, in_slots = (torch.zeros(64 << 10, dtype=torch.uint8) for _ in range(2))
    before = movers.BATCHED_FROM_BYTES
    with (
        pytest.raises(RuntimeError, match="go in place, not staged"),
        device_link._only(Way.STAGED, CpuDevice(), form.copies(memory, in_slots, 0)),
    ):
        pass
    assert before == movers.BATCHED_FROM_BYTES


@pytest.mark.parametrize("size_bytes", [1, 4096, 1 << 20])
def test_slots_are_as_large_as_asked_for(size_bytes: int) -> None:
    with slots(torch.device("cpu"), size_bytes) as in_slots:
        assert len(in_slots) == size_bytes
        in_slots.fill_(7)


@pytest.mark.parametrize("page_bytes", [4 << 10, 32 << 10, 1 << 20])
def test_a_form_has_chunks_and_pages_of_its_sizes(page_bytes: int) -> None:
    form = Form(1 << 20, page_bytes)
    memory, in_slots = (torch.zeros(4 << 20, dtype=torch.uint8) for _ in range(2))
    copies = form.copies(memory, in_slots, 0)
    assert len(copies) == 4
    assert all(copy.num_bytes == len(copy.slot) == 1 << 20 for copy in copies)
    assert all(plane[0].numel() == page_bytes for plane in copies[0].kv.planes)
    pages = torch.tensor([page for copy in copies for page in copy.pages])
    assert len(set(pages.tolist())) == len(pages) == copies[0].kv.num_pages
