import numpy as np
import pytest

from rootcellar.bench.tune.trace import Trace


def trace(*chains: list[int]) -> Trace:
    lengths = [len(chain) for chain in chains]
    return Trace(
        name="t",
        ids=np.array([one for chain in chains for one in chain], np.int32),
        offsets=np.array([0, *np.cumsum(lengths)], np.int64),
        times_s=np.arange(len(chains), dtype=np.float64),
        input_tokens=np.array(lengths, np.int64),
        output_tokens=np.zeros(len(chains), np.int64),
        chunk_tokens=1,
    )


def test_it_knows_the_chunk_before_each_one() -> None:
    made = trace([0, 1, 2], [], [0, 3], [4, 5], [], [0, 1, 6])
    made.check_integrity()
    assert made.parents.tolist() == [-1, 0, 1, 0, -1, 4, 1]
    assert made.parents.dtype == np.int32
    assert (made.num_requests, made.refs, made.distinct, made.duration_s) == (6, 10, 7, 5.0)


def test_one_without_requests_is_one() -> None:
    made = trace()
    made.check_integrity()
    assert (made.num_requests, made.refs, made.distinct, made.duration_s) == (0, 0, 0, 0.0)


@pytest.mark.parametrize(
    "chains",
    [
        ([0, 1], [2, 1]),
        ([0, 1], [1]),
        ([0, 2], [0, 1]),
        ([0], [0, 0]),
    ],
    ids=["two parents", "head and not", "out of order", "its own parent"],
)
def test_its_check_finds_chains_that_are_no_prefixes(chains: tuple[list[int], ...]) -> None:
    with pytest.raises(AssertionError):
        trace(*chains).check_integrity()
