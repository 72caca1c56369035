"""What every IO backend does; the same class runs against both."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from rootcellar.tiers.chunk_file import (
    HEADER_BYTES,
    file_bytes,
    pack_header,
)
from rootcellar.tiers.codec import PlaneCodec
from rootcellar.tiers.io.base import (
    Codec,
    DeleteJob,
    Job,
    ReadJob,
    ReclaimJob,
    Status,
    WriteJob,
)
from rootcellar.tiers.io.testing import (
    ITEMSIZE,
    SLOT_BYTES,
    IoWorld,
    Kind,
    content_of,
    file_of,
    key_of,
    make_file,
    meta_of,
)

KINDS: list[Kind] = ["process", "threads"]


@pytest.fixture(scope="module", params=KINDS)
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[IoWorld]:
    world = IoWorld(tmp_path_factory.mktemp("io") / "store", request.param)
    yield world
    world.close()


@pytest.fixture
def world(shared: IoWorld) -> Iterator[IoWorld]:
    """One backend for all tests, on an empty store each time."""
    yield shared
    assert shared.backend.poll() == []
    assert shared.temporaries() == []
    assert shared.backend.alive
    for folder in ("chunks", "dropped"):
        shutil.rmtree(shared.root / folder, ignore_errors=True)
        (shared.root / folder).unlink(missing_ok=True)
        (shared.root / folder).mkdir()


def _chunk_bytes(world: IoWorld) -> int:
    return sum(path.stat().st_size for path in world.root.rglob("*.kv"))


class TestReadingWhatWasWritten:
    @pytest.mark.parametrize("payload_bytes", [SLOT_BYTES, SLOT_BYTES - 4096, 5000, 2])
    @pytest.mark.parametrize("codec", list(Codec))
    def test_it_comes_back_byte_for_byte(
        self, world: IoWorld, codec: Codec, payload_bytes: int
    ) -> None:
        meta = meta_of(1, payload_bytes=payload_bytes, codec=codec)
        done = world.write(meta)
        assert done.status is Status.OK
        assert done.file_bytes == file_bytes(done.stored_bytes, done.codec)
        assert done.file_bytes == world.path(meta).stat().st_size
        stored = replace(meta, stored_bytes=done.stored_bytes, codec=done.codec)
        assert world.read(stored).status is Status.OK
        assert world.holds(meta)

    def test_the_file_is_as_the_format_says(self, world: IoWorld) -> None:
        meta = meta_of(1, payload_bytes=5000)
        world.write(meta)
        expected = make_file(world.root / "by hand", meta).read_bytes()
        assert world.path(meta).read_bytes() == expected
        assert world.path(meta).stat().st_mode & 0o777 == 0o600
        shutil.rmtree(world.root / "by hand")

    def test_a_file_made_by_hand_is_read(self, world: IoWorld) -> None:
        make_file(world.root, meta_of(1))
        assert world.read(meta_of(1)).status is Status.OK
        assert world.holds(meta_of(1))

    def test_what_compresses_is_smaller(self, world: IoWorld) -> None:
        done = world.write(meta_of(1, codec=Codec.ZSTD_PLANES))
        assert done.codec is Codec.ZSTD_PLANES
        assert done.file_bytes < file_bytes(SLOT_BYTES, Codec.RAW)

    def test_what_does_not_compress_is_stored_raw(self, world: IoWorld) -> None:
        meta = meta_of(1, codec=Codec.ZSTD_PLANES)
        world.folder(meta)
        noise = os.urandom(SLOT_BYTES)
        world.arena.slot(0)[:] = noise
        done = world.run(WriteJob(world.new_id(), meta, 0))[0]
        assert (done.codec, done.stored_bytes) == (Codec.RAW, SLOT_BYTES)
        assert world.read(replace(meta, codec=Codec.RAW)).status is Status.OK
        assert world.arena.slot(1) == noise

    def test_writing_a_key_again_replaces_its_file(self, world: IoWorld) -> None:
        world.write(meta_of(1, payload_bytes=SLOT_BYTES))
        shorter = meta_of(1, payload_bytes=4096)
        assert world.write(shorter).status is Status.OK
        assert world.read(shorter).status is Status.OK
        assert _chunk_bytes(world) == HEADER_BYTES + 4096

    def test_many_jobs_come_back_once_each(self, world: IoWorld) -> None:
        metas = [meta_of(number) for number in range(100)]
        for meta in metas:
            make_file(world.root, meta)
        for start in range(0, len(metas), 8):  # a slot takes one read at a time
            batch = enumerate(metas[start : start + 8])
            done = world.run(*(ReadJob(world.new_id(), meta, slot) for slot, meta in batch))
            assert {each.status for each in done} == {Status.OK}

    def test_reads_and_writes_are_served_side_by_side(self, world: IoWorld) -> None:
        jobs: list[Job] = []
        for number in range(4):
            world.write(meta_of(number))
            world.fill(meta_of(number + 10), 4 + number)
        for number in range(4):
            jobs.append(WriteJob(world.new_id(), meta_of(number + 10), 4 + number))
            jobs.append(ReadJob(world.new_id(), meta_of(number), number))
        assert {done.status for done in world.run(*jobs)} == {Status.OK}
        assert all(world.holds(meta_of(number), number) for number in range(4))


class TestNeverWrongBytes:
    @pytest.mark.parametrize(
        "change",
        [
            {"namespace": key_of(7)},
            {"generation": 2},
            {"parent": key_of(8)},
            {"num_tokens": 255},
            {"payload_bytes": SLOT_BYTES - 2, "stored_bytes": SLOT_BYTES - 2},
            {"payload_bytes": SLOT_BYTES - 2},
            {"stored_bytes": SLOT_BYTES - 2},
            {"codec": Codec.ZSTD_PLANES},
            {"key": key_of(9)},
        ],
    )
    def test_a_file_that_says_something_else_in_one_field_is_corrupt(
        self, world: IoWorld, change: dict[str, bytes | int]
    ) -> None:
        meta = meta_of(1)
        other = replace(meta, **change)  # type: ignore[arg-type]  # mypy cannot see which field
        written = make_file(world.root, meta)
        wanted = world.path(other)
        wanted.parent.mkdir(parents=True, exist_ok=True)
        written.rename(wanted)
        assert world.read(other).status is Status.CORRUPT

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(bit=st.integers(0, 8 * (HEADER_BYTES + 5000) - 1), codec=st.sampled_from(list(Codec)))
    def test_any_flipped_bit_is_corrupt(self, world: IoWorld, bit: int, codec: Codec) -> None:
        meta = meta_of(1, payload_bytes=10_000, codec=codec)
        done = world.write(meta)
        stored = replace(meta, stored_bytes=done.stored_bytes, codec=done.codec)
        content = bytearray(world.path(meta).read_bytes())
        content[bit // 8] ^= 1 << bit % 8
        world.path(meta).write_bytes(content)
        assert world.read(stored).status is Status.CORRUPT

    @pytest.mark.parametrize("left_bytes", [0, 100, HEADER_BYTES, HEADER_BYTES + 8192])
    def test_a_truncated_file_is_corrupt(self, world: IoWorld, left_bytes: int) -> None:
        os.truncate(make_file(world.root, meta_of(1)), left_bytes)
        assert world.read(meta_of(1)).status is Status.CORRUPT

    def test_a_raw_file_that_stores_less_than_the_payload_is_corrupt(self, world: IoWorld) -> None:
        less = replace(meta_of(1), stored_bytes=SLOT_BYTES // 2)
        path = make_file(world.root, meta_of(1))
        stored = content_of(less)[: less.stored_bytes]
        path.write_bytes(pack_header(less, xxh3_128_digest(stored)) + stored)
        assert world.read(less).status is Status.CORRUPT

    def test_a_frame_as_long_as_the_slot_is_no_longer_payload(self, world: IoWorld) -> None:
        frame = PlaneCodec(ITEMSIZE).encode(memoryview(content_of(meta_of(1))))
        meta = replace(
            meta_of(1, payload_bytes=SLOT_BYTES + 2, codec=Codec.ZSTD_PLANES),
            stored_bytes=len(frame),
        )
        path = world.path(meta)
        path.parent.mkdir(parents=True)
        content = pack_header(meta, xxh3_128_digest(frame)) + frame
        path.write_bytes(content.ljust(file_bytes(len(frame), meta.codec), b"\0"))
        assert world.read(meta).status is Status.CORRUPT

    def test_a_file_that_is_not_there_is_missing(self, world: IoWorld) -> None:
        assert world.read(meta_of(1)).status is Status.MISSING

    def test_a_folder_in_a_files_place_is_a_failure(self, world: IoWorld) -> None:
        world.path(meta_of(1)).mkdir(parents=True)
        assert world.read(meta_of(1)).status is Status.FAILED

    def test_a_length_that_no_slot_holds_is_corrupt(self, world: IoWorld) -> None:
        huge = replace(meta_of(1), payload_bytes=1 << 40, stored_bytes=1 << 40)
        assert world.read(huge).status is Status.CORRUPT
        assert world.read(replace(huge, codec=Codec.ZSTD_PLANES)).status is Status.CORRUPT


class TestMakingRoom:
    def test_a_victim_of_equal_size_is_overwritten_in_place(self, world: IoWorld) -> None:
        world.write(meta_of(1))
        with world.path(meta_of(1)).open("rb") as victim:  # or its number could be given again
            done = world.write(meta_of(2), victims=[file_of(meta_of(1))])
            assert os.path.samestat(os.fstat(victim.fileno()), world.path(meta_of(2)).stat())
        assert (done.status, done.leaked_bytes) == (Status.OK, 0)
        assert world.read(meta_of(2)).status is Status.OK
        assert world.holds(meta_of(2))
        assert world.read(meta_of(1)).status is Status.MISSING

    def test_victims_of_other_sizes_are_removed(self, world: IoWorld) -> None:
        small = [meta_of(number, payload_bytes=100) for number in (1, 2, 3)]
        for meta in small:
            world.write(meta)
        assert world.write(meta_of(4), victims=map(file_of, small)).status is Status.OK
        assert _chunk_bytes(world) == file_bytes(SLOT_BYTES, Codec.RAW)

    def test_of_victims_one_is_recycled_and_the_others_go(self, world: IoWorld) -> None:
        victims = [meta_of(1, payload_bytes=100), meta_of(2), meta_of(3)]
        for meta in victims:
            world.write(meta)
        assert world.write(meta_of(4), victims=map(file_of, victims)).status is Status.OK
        assert _chunk_bytes(world) == file_bytes(SLOT_BYTES, Codec.RAW)

    def test_a_victim_that_is_gone_already_does_not_matter(self, world: IoWorld) -> None:
        done = world.write(meta_of(2), victims=[file_of(meta_of(1))])
        assert (done.status, done.leaked_bytes) == (Status.OK, 0)
        assert world.read(meta_of(2)).status is Status.OK

    def test_a_victim_larger_than_it_was_known_leaves_nothing_of_itself(
        self, world: IoWorld
    ) -> None:
        with make_file(world.root, meta_of(1)).open("ab") as file:
            file.write(bytes(8192))
        done = world.write(meta_of(2), victims=[file_of(meta_of(1))])
        assert done.file_bytes == world.path(meta_of(2)).stat().st_size

    def test_a_victim_that_cannot_go_is_reported_and_nothing_is_written(
        self, world: IoWorld
    ) -> None:
        stuck = world.path(meta_of(1, payload_bytes=100))
        (stuck / "a folder in the place of the file").mkdir(parents=True)
        victim = file_of(meta_of(1, payload_bytes=100))
        done = world.write(meta_of(2), victims=[victim])
        assert (done.status, done.leaked_bytes) == (Status.FAILED, victim.file_bytes)
        assert not world.path(meta_of(2)).exists()


class TestARefusingMedium:
    def test_what_was_written_for_a_dropped_namespace_does_not_come_back(
        self, world: IoWorld
    ) -> None:
        world.fill(meta_of(1), 0)
        done = world.run(WriteJob(world.new_id(), meta_of(1), 0))[0]
        assert (done.status, done.leaked_bytes) == (Status.FAILED, 0)
        assert list((world.root / "chunks").iterdir()) == []

    def test_a_recycled_file_of_a_dropped_namespace_is_gone(self, world: IoWorld) -> None:
        world.write(meta_of(1))
        victim, later = file_of(meta_of(1)), meta_of(2, generation=2)
        done = world.run(WriteJob(world.new_id(), later, 0, (victim,)))[0]
        assert (done.status, done.leaked_bytes) == (Status.FAILED, 0)
        assert _chunk_bytes(world) == 0

    def test_a_file_where_a_folder_should_be_is_a_result(self, world: IoWorld) -> None:
        world.write(meta_of(1))
        shutil.rmtree(world.root / "chunks")
        (world.root / "chunks").write_text("not a folder")
        world.fill(meta_of(2), 0)
        assert world.run(WriteJob(world.new_id(), meta_of(2), 0))[0].status is Status.FAILED
        assert world.read(meta_of(1)).status is Status.MISSING
        assert world.delete(file_of(meta_of(1))).status is Status.OK

    def test_a_payload_larger_than_a_slot_is_refused(self, world: IoWorld) -> None:
        meta = meta_of(1)
        world.folder(meta)
        larger = replace(meta, payload_bytes=SLOT_BYTES + 1)
        assert world.run(WriteJob(world.new_id(), larger, 0))[0].status is Status.FAILED

    def test_a_slot_that_does_not_exist_is_refused(self, world: IoWorld) -> None:
        make_file(world.root, meta_of(1))
        assert world.run(ReadJob(world.new_id(), meta_of(1), 8))[0].status is Status.FAILED


class TestRemoving:
    def test_deleted_files_are_gone_and_counted(self, world: IoWorld) -> None:
        for number in (1, 2):
            world.write(meta_of(number))
        done = world.delete(*(file_of(meta_of(number)) for number in (1, 2, 3)))
        assert done.status is Status.OK
        assert done.file_bytes == 2 * file_bytes(SLOT_BYTES, Codec.RAW)
        assert _chunk_bytes(world) == 0

    def test_a_file_that_cannot_be_deleted_is_reported(self, world: IoWorld) -> None:
        (world.path(meta_of(1)) / "in the way").mkdir(parents=True)
        world.write(meta_of(2))
        done = world.delete(file_of(meta_of(1)), file_of(meta_of(2)))
        size_bytes = file_bytes(SLOT_BYTES, Codec.RAW)
        assert (done.status, done.file_bytes) == (Status.FAILED, size_bytes)
        assert done.leaked_bytes == size_bytes

    def test_a_dropped_folder_is_reclaimed_in_steps(self, world: IoWorld) -> None:
        for number in range(5):
            world.write(meta_of(number))
        folder = world.folder(meta_of(0))
        folder.rename(world.root / "dropped" / folder.name)
        freed_bytes, statuses = 0, []
        while (world.root / "dropped" / folder.name).exists():
            done = world.run(ReclaimJob(world.new_id(), folder.name, 2))[0]
            freed_bytes += done.file_bytes
            statuses.append(done.status)
        assert statuses == [Status.UNAVAILABLE, Status.UNAVAILABLE, Status.OK]
        assert freed_bytes == 5 * file_bytes(SLOT_BYTES, Codec.RAW)

    def test_a_dropped_folder_that_is_gone_already_is_reclaimed(self, world: IoWorld) -> None:
        assert world.run(ReclaimJob(world.new_id(), "never there"))[0].status is Status.OK

    @pytest.mark.parametrize("name", ["", ".", "..", "../chunks", "/etc"])
    def test_nothing_outside_of_dropped_is_reclaimed(self, world: IoWorld, name: str) -> None:
        world.write(meta_of(1))
        assert world.run(ReclaimJob(world.new_id(), name))[0].status is Status.FAILED
        assert world.read(meta_of(1)).status is Status.OK

    def test_a_foreign_folder_with_odd_names_is_reclaimed(self, world: IoWorld) -> None:
        folder = world.root / "dropped" / os.fsdecode(b"odd \xff name")
        (folder / "a" / "b").mkdir(parents=True)
        (folder / "a" / "b" / "c").write_bytes(b"12345")
        done = world.run(ReclaimJob(world.new_id(), folder.name))[0]
        assert (done.status, done.file_bytes) == (Status.OK, 5)
        assert not folder.exists()


class TestTheBackendItself:
    def test_more_jobs_than_may_be_in_flight_are_the_callers_error(self, world: IoWorld) -> None:
        job = DeleteJob(0, ())
        with pytest.raises(ValueError, match="max_in_flight"):
            world.backend.submit([job] * (world.backend.max_in_flight + 1))
        assert world.delete().status is Status.OK

    def test_as_many_as_may_be_in_flight_go_through_again_and_again(self, world: IoWorld) -> None:
        for _ in range(2):
            jobs = [DeleteJob(world.new_id(), ()) for _ in range(world.backend.max_in_flight)]
            world.backend.submit(jobs)
            with pytest.raises(ValueError, match="max_in_flight"):
                world.backend.submit([DeleteJob(0, ())])
            done = world.take(len(jobs))
            assert {completion.job_id for completion in done} == {job.job_id for job in jobs}

    def test_a_job_of_megabytes_goes_through(self, world: IoWorld) -> None:
        files = tuple(file_of(meta_of(1)) for _ in range(50_000))
        assert world.run(DeleteJob(world.new_id(), files))[0].status is Status.OK

    def test_waiting_ends_when_there_is_nothing(self, world: IoWorld) -> None:
        world.backend.wait(0.01)
        world.backend.wait(0.01)
        assert world.backend.poll() == []
