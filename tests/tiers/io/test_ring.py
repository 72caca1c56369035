import mmap
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.tiers.io.base import Codec, Completion, Status
from rootcellar.tiers.io.ring import RingReader, RingWriter, create_ring, ring_bytes

CAPACITY = 4
U64 = st.integers(0, 2**64 - 1)
COMPLETIONS = st.builds(
    Completion, U64, st.sampled_from(Status), st.sampled_from(Codec), U64, U64, U64
)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_ring(CAPACITY)
    yield fd
    os.close(fd)


@given(batches=st.lists(st.lists(COMPLETIONS, max_size=CAPACITY), max_size=10))
def test_what_is_put_is_taken_in_order_also_around_the_end(batches: list[list[Completion]]) -> None:
    fd = create_ring(CAPACITY)
    writer, reader = RingWriter(fd, CAPACITY), RingReader(fd, CAPACITY)
    for batch in batches:
        for done in batch:
            writer.put(done)
        assert reader.ready == bool(batch)
        assert reader.take() == batch
        assert reader.take() == []
    writer.close()
    reader.close()
    os.close(fd)


def test_an_entry_that_is_half_written_is_not_there_yet(fd: int) -> None:
    """Any byte of it may be the last one to become visible."""
    writer, reader = RingWriter(fd, CAPACITY), RingReader(fd, CAPACITY)
    done = Completion(2**64 - 1, Status.FAILED, Codec.ZSTD_PLANES, 2**63, 2**62 + 7, 2**61 + 9)
    with mmap.mmap(fd, ring_bytes(CAPACITY)) as memory:
        before = bytes(memory)
        writer.put(done)
        after = bytes(memory)
        changed = [at for at in range(len(after)) if before[at] != after[at]]
        assert len(changed) > 20
        for at in changed:
            memory[at] = before[at]
            assert reader.take() == []
            memory[at] = after[at]
        assert reader.take() == [done]
    writer.close()
    reader.close()


def test_what_an_earlier_round_left_behind_is_not_taken_again(fd: int) -> None:
    writer, reader = RingWriter(fd, CAPACITY), RingReader(fd, CAPACITY)
    for job_id in range(CAPACITY):
        writer.put(Completion(job_id, Status.OK))
    assert len(reader.take()) == CAPACITY
    assert not reader.ready
    assert reader.take() == []
    writer.close()
    reader.close()
