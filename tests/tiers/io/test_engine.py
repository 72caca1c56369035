"""Which lane does what; the engine as a whole is tested through the backends."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.tiers.io.base import DeleteJob, Job, ReadJob
from rootcellar.tiers.io.engine import READS_PER_WRITE, JobQueue
from rootcellar.tiers.io.testing import meta_of


def _reads(*numbers: int) -> list[Job]:
    return [ReadJob(number, meta_of(number), 0) for number in numbers]


def _others(*numbers: int) -> list[Job]:
    return [DeleteJob(number, ()) for number in numbers]


def _queue(lanes: int, *jobs: Iterable[Job]) -> JobQueue:
    queue = JobQueue(lanes)
    for some in jobs:
        queue.put(some)
    return queue


def _taken(queue: JobQueue, lane: int) -> list[int]:
    numbers: list[int] = []
    while (job := queue.take(lane)) is not None:
        numbers.append(job.job_id)
    return numbers


def test_the_first_lane_keeps_writing_however_many_reads_there_are() -> None:
    assert _taken(_queue(4, _reads(1, 2), _others(3, 4)), 0) == [3, 4, 1, 2]


def test_the_last_lane_is_kept_for_reads() -> None:
    assert _taken(_queue(4, _others(3, 4), _reads(1, 2)), 3) == [1, 2]


@pytest.mark.parametrize("lane", [1, 2])
def test_the_lanes_between_read_before_they_write(lane: int) -> None:
    assert _taken(_queue(4, _others(3, 4), _reads(1, 2)), lane) == [1, 2, 3, 4]


def test_a_lane_alone_lets_a_write_through_now_and_then() -> None:
    reads = range(2 * READS_PER_WRITE + 1)
    taken = _taken(_queue(1, _reads(*reads), _others(100, 101, 102)), 0)
    assert taken.index(100) == READS_PER_WRITE
    assert taken.index(101) == 2 * READS_PER_WRITE + 1
    assert sorted(taken) == [*reads, 100, 101, 102]


@given(
    lanes=st.integers(1, 6),
    reads=st.integers(0, 8),
    others=st.integers(0, 8),
    busy=st.sets(st.integers(0, 5)),
)
def test_every_job_that_an_idle_lane_can_do_gets_one(
    lanes: int, reads: int, others: int, busy: set[int]
) -> None:
    queue = _queue(lanes, _reads(*range(reads)), _others(*range(others)))
    idle = set(range(lanes)) - busy
    wanted = queue.lanes_wanted(busy)
    assert len(set(wanted)) == len(wanted) <= reads + others
    assert idle.issuperset(wanted)
    for lane in [*wanted, *wanted]:  # in turns, as lanes that each do one job at a time
        queue.take(lane)
    for lane in wanted:
        _taken(queue, lane)
    assert all(queue.take(lane) is None for lane in idle)
