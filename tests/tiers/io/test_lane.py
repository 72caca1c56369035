"""One lane's care with the disk, where a backend's other side would only be in the way."""

import os
from pathlib import Path

import pytest

from rootcellar.tiers.chunk_file import HEADER_BYTES, parse_header
from rootcellar.tiers.io.base import ReadJob, Status, WriteJob
from rootcellar.tiers.io.testing import SLOT_BYTES, IoWorld, content_of, file_of, make_file, meta_of


def test_the_padding_of_a_slot_does_not_reach_the_disk(tmp_path: Path) -> None:
    world = IoWorld(tmp_path / "store", "threads")
    meta = meta_of(1, payload_bytes=5000)
    world.write(meta)
    content = world.path(meta).read_bytes()
    parsed = parse_header(content[:HEADER_BYTES])
    assert parsed is not None
    assert parsed[0] == meta
    assert content[HEADER_BYTES:] == content_of(meta).ljust(8192, b"\0")
    world.close()


def test_without_o_direct_it_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootcellar.tiers.io.engine.supports_o_direct", lambda root: False)
    world = IoWorld(tmp_path / "store", "threads")
    meta = meta_of(1, payload_bytes=9000)
    assert world.write(meta).status is Status.OK
    assert world.read(meta).status is Status.OK
    assert world.holds(meta)
    os.truncate(world.path(meta), HEADER_BYTES + 4096)
    job = ReadJob(world.new_id(), meta, 1)  # into the slot that has the right bytes from before
    assert world.run(job)[0].status is Status.CORRUPT
    world.close()


@pytest.mark.parametrize(
    "victim_bytes", [[], [SLOT_BYTES], [100, 100, 100], [100, SLOT_BYTES, SLOT_BYTES, 5000]]
)
def test_the_disk_never_holds_more_than_the_victims_leave_room_for(
    tmp_path: Path, victim_bytes: list[int]
) -> None:
    root, seen = tmp_path / "store", list[tuple[str, int]]()

    def pause(point: str) -> None:
        files = [path for name in ("chunks", "tmp") for path in (root / name).rglob("*")]
        seen.append((point, sum(path.stat().st_size for path in files if path.is_file())))

    world = IoWorld(root, "threads", pause=pause)
    victims = [meta_of(at, payload_bytes=size) for at, size in enumerate(victim_bytes)]
    stays, new = meta_of(10), meta_of(11)
    for meta in [*victims, stays]:
        make_file(root, meta)
    assert world.write(new, victims=map(file_of, victims)).status is Status.OK
    world.close()
    held_bytes = dict(seen)
    room_bytes = file_of(stays).file_bytes + file_of(new).file_bytes
    assert held_bytes["write"] <= held_bytes["rename"] == room_bytes


def test_a_folder_that_another_lane_made_first_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = IoWorld(tmp_path / "store", "threads")
    world.folder(meta_of(1))
    make = os.mkdir

    def make_twice(path: str, mode: int) -> None:
        make(path, mode)
        make(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", make_twice)
        world.fill(meta_of(1), 0)
        assert world.run(WriteJob(world.new_id(), meta_of(1), 0))[0].status is Status.OK
    assert world.read(meta_of(1)).status is Status.OK
    world.close()
