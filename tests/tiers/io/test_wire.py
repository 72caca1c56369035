from hypothesis import given
from hypothesis import strategies as st

from rootcellar.tiers.io.base import (
    ChunkMeta,
    Codec,
    DeleteJob,
    FileRef,
    Job,
    ReadJob,
    ReclaimJob,
    TouchJob,
    WriteJob,
)
from rootcellar.tiers.io.wire import CLOSE, Unpacker, pack

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
NAME = st.binary(min_size=32, max_size=32)
METAS = st.builds(
    ChunkMeta,
    namespace=NAME,
    generation=U64,
    key=NAME,
    parent=NAME,
    num_tokens=U32,
    payload_bytes=U64,
    stored_bytes=U64,
    codec=st.sampled_from(Codec),
)
FILES = st.lists(st.builds(FileRef, NAME, U64, NAME, U64), max_size=5).map(tuple)
USES = st.lists(st.tuples(NAME, st.floats(allow_nan=False), U32), max_size=5).map(tuple)
FOLDERS = st.binary(max_size=20).map(lambda name: name.decode("utf-8", "surrogateescape"))
JOBS: st.SearchStrategy[Job] = st.one_of(
    st.builds(ReadJob, U64, METAS, U32),
    st.builds(WriteJob, U64, METAS, U32, FILES),
    st.builds(DeleteJob, U64, FILES),
    st.builds(ReclaimJob, U64, FOLDERS, U32),
    st.builds(TouchJob, U64, USES),
)


@given(jobs=st.lists(JOBS, max_size=8), cuts=st.lists(st.integers(0, 4000), max_size=8))
def test_jobs_arrive_as_they_were_however_the_bytes_are_cut(
    jobs: list[Job], cuts: list[int]
) -> None:
    message, unpacker, arrived, start = pack(jobs), Unpacker(), list[Job](), 0
    for end in [*sorted(cuts), len(message)]:
        arrived += unpacker.feed(message[start:end])
        start = max(start, end)
    assert arrived == jobs
    assert not unpacker.closing


def test_the_last_message_is_seen_behind_the_jobs_before_it() -> None:
    jobs: list[Job] = [DeleteJob(1, ()), TouchJob(2, ())]
    unpacker = Unpacker()
    assert unpacker.feed(pack(jobs) + CLOSE[:-1]) == jobs
    assert not unpacker.closing
    assert unpacker.feed(CLOSE[-1:]) == []
    assert unpacker.closing
