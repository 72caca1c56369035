from hypothesis import given, settings

from rootcellar.bench.tune.reuse import ReuseRuns, reuse_runs
from rootcellar.bench.tune.trace import Trace

from .small_traces import chains, sessions_trace, trace_of, traces

Run = tuple[int, int, int, int]


def as_tuples(runs: ReuseRuns) -> list[Run]:
    columns = (runs.request, runs.previous, runs.start, runs.stop)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def naive_runs(trace: Trace) -> list[Run]:
    last: dict[int, int] = {}
    found: list[Run] = []
    for request, chain in enumerate(chains(trace)):
        for place, chunk in enumerate(chain):
            previous = last.get(chunk)
            last[chunk] = request
            if previous is None:
                continue
            if found and found[-1][:2] == (request, previous) and found[-1][3] == place:
                found[-1] = (request, previous, found[-1][2], place + 1)
            else:
                found.append((request, previous, place, place + 1))
    return found


def test_a_request_comes_back_to_what_several_others_left() -> None:
    trace = trace_of([[1, 2, 3, 4], [1, 2, 9], [1], [1, 2, 3, 8]])
    assert as_tuples(reuse_runs(trace)) == [
        (1, 0, 0, 2),
        (2, 1, 0, 1),
        (3, 2, 0, 1),
        (3, 1, 1, 2),
        (3, 0, 2, 3),
    ]


def test_new_chunks_and_empty_requests_make_no_run() -> None:
    assert as_tuples(reuse_runs(trace_of([[1, 2], [], [3], []]))) == []
    assert as_tuples(reuse_runs(trace_of([]))) == []


@given(traces())
@settings(deadline=None)
def test_runs_say_of_every_reference_which_request_used_it_last(trace: Trace) -> None:
    assert as_tuples(reuse_runs(trace)) == naive_runs(trace)


def test_a_request_of_many_chunks_comes_back_in_few_runs() -> None:
    trace = sessions_trace(0)
    runs = reuse_runs(trace)
    assert as_tuples(runs) == naive_runs(trace)
    assert len(runs.request) < 3 * trace.num_requests < trace.refs / 3
