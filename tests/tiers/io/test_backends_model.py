"""Random batches, against a dict of the chunks that should be there."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootcellar.tiers.index import load
from rootcellar.tiers.io.base import (
    ChunkMeta,
    Codec,
    Completion,
    DeleteJob,
    FileRef,
    Job,
    ReadJob,
    Status,
    WriteJob,
)
from rootcellar.tiers.io.testing import SLOT_BYTES, IoWorld, Kind, file_of, meta_of

NUM_CHUNKS = 6
KINDS: list[Kind] = ["process", "threads"]


@dataclass(frozen=True)
class _Step:
    """What a batch does with one chunk. as_victim: a delete is left to the batch's next write."""

    verb: str
    payload_bytes: int
    codec: Codec
    as_victim: bool


STEPS = st.builds(
    _Step,
    st.sampled_from(["write", "write", "read", "delete", "nothing"]),
    st.sampled_from([SLOT_BYTES, SLOT_BYTES - 2, 3, 5000]),
    st.sampled_from(Codec),
    st.booleans(),
)
BATCHES = st.lists(st.lists(STEPS, min_size=NUM_CHUNKS, max_size=NUM_CHUNKS), max_size=6)


@dataclass
class _Model:
    world: IoWorld
    held: dict[bytes, ChunkMeta] = field(default_factory=dict[bytes, ChunkMeta])
    """By key, as stored."""

    def run(self, batch: list[_Step]) -> None:
        jobs = self._jobs(batch)
        for job, done in zip(jobs, self.world.run(*jobs), strict=True):
            self._check(job, done)
        assert self.world.backend.poll() == []
        sizes = {path.stem: path.stat().st_size for path in self.world.root.rglob("*.kv")}
        held = self.held.values()
        assert sizes == {meta.key.hex(): file_of(meta).file_bytes for meta in held}

    def _jobs(self, batch: list[_Step]) -> list[Job]:
        """Each chunk in one job, with a slot of its own."""
        jobs: list[Job] = []
        victims: list[FileRef] = []
        for number, step in enumerate(batch):
            meta = meta_of(number, payload_bytes=step.payload_bytes, codec=step.codec)
            stored = self.held.get(meta.key, meta)
            match step.verb:
                case "write":
                    self.world.fill(meta, number)
                    job_id = self.world.new_id()
                    jobs.append(WriteJob(job_id, meta, number, tuple(victims)))
                    victims = []
                case "read":
                    self.world.arena.slot(number)[:] = bytes(SLOT_BYTES)
                    jobs.append(ReadJob(self.world.new_id(), stored, number))
                case "delete" if step.as_victim:
                    victims.append(file_of(stored))
                case "delete":
                    jobs.append(DeleteJob(self.world.new_id(), (file_of(stored),)))
                case _:
                    pass
        return jobs

    def _check(self, job: Job, done: Completion) -> None:
        match job:
            case WriteJob(meta=meta, victims=victims):
                assert done.status is Status.OK
                for victim in victims:
                    self.held.pop(victim.key, None)
                stored = replace(meta, stored_bytes=done.stored_bytes, codec=done.codec)
                self.held[meta.key] = stored
            case ReadJob(meta=meta, slot=slot) if meta.key in self.held:
                assert done.status is Status.OK
                assert self.world.holds(meta, slot)
            case ReadJob():
                assert done.status is Status.MISSING
            case DeleteJob(files=(file,)):
                there = self.held.pop(file.key, None) is not None
                assert (done.status, done.file_bytes) == (Status.OK, file.file_bytes * there)
            case _:
                raise AssertionError(job)


@pytest.fixture(scope="module", params=KINDS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[IoWorld]:
    """One backend for all examples; what the last one left must be what the index says."""
    world = IoWorld(tmp_path_factory.mktemp("io") / "store", request.param)
    world.folder(meta_of(0))
    yield world
    world.close()
    rows = load(world.root / "index.lmdb").rows
    sizes = {path.stem: path.stat().st_size for path in world.root.rglob("*.kv")}
    assert {row.key.hex(): row.file_bytes for row in rows} == sizes


@settings(max_examples=50)
@given(batches=BATCHES)
def test_batches_do_what_they_would_to_a_dict(world: IoWorld, batches: list[list[_Step]]) -> None:
    model = _Model(world)
    world.run(DeleteJob(world.new_id(), tuple(file_of(meta_of(n)) for n in range(NUM_CHUNKS))))
    for batch in batches:
        model.run(batch)
