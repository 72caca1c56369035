from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.admission.base import Tier
from rootcellar.admission.load_cost import MIN_MEASURED, TRY_EVERY, LoadCost

MIB = 1 << 20
CHUNK = 32 * MIB
COLD = (Tier.DRAM, Tier.NVME)
SIZES = (1, 2, 3, 5, 8, 13, 40, 100)
"""Chunks of the loads measured; one pass is enough to be known."""


def measured(
    speeds: dict[Tier, tuple[float, float]], prefill_s_per_token: float | None = None
) -> LoadCost:
    """speeds: (latency in s, bytes/s) of each tier."""
    cost = LoadCost()
    for tier, (latency_s, bytes_per_s) in speeds.items():
        for chunks in SIZES:
            cost.observe_load(tier, chunks * CHUNK, latency_s + chunks * CHUNK / bytes_per_s)
    if prefill_s_per_token is not None:
        for tokens in (100, 200, 500, 700, 1000, 2000, 3000, 8000):
            cost.observe_prefill(tokens, tokens * prefill_s_per_token)
    return cost


def brute_force(
    cost: LoadCost, tiers: Sequence[Tier], chunk_bytes: int, tokens: int
) -> list[float]:
    """Seconds of each stop from 0 to all: the loads of each tier, one by one, and the prefill."""
    seconds = []
    for stop in range(len(tiers) + 1):
        total = cost.prefill_s(tokens * (len(tiers) - stop)) or 0.0
        for tier in Tier:
            count = tiers[:stop].count(tier)
            total += (cost.load_s(tier, count * chunk_bytes) or 0.0) if count else 0.0
        seconds.append(total)
    return seconds


def test_nothing_measured_means_everything_is_loaded() -> None:
    assert LoadCost().worth([Tier.NVME] * 5, CHUNK, 256) == 5
    assert LoadCost().worth([], CHUNK, 256) == 0
    slow_disk = measured({Tier.NVME: (1.0, 1.0)})
    assert slow_disk.worth([Tier.NVME] * 5, CHUNK, 256) == 5, "prefill is not known"
    fast_engine = measured({}, 1e-9)
    assert fast_engine.worth([Tier.NVME] * 5, CHUNK, 256) == 5, "the disk is not known"


def test_a_few_measurements_are_not_enough_to_refuse() -> None:
    cost = measured({}, 1e-6)
    for count in range(MIN_MEASURED):
        assert cost.load_s(Tier.NVME, CHUNK) is None
        assert cost.worth([Tier.NVME] * 3, CHUNK, 256) == 3, count
        cost.observe_load(Tier.NVME, CHUNK, 30.0)
    assert cost.worth([Tier.NVME] * 3, CHUNK, 256) == 0


def test_latency_and_speed_are_told_apart() -> None:
    cost = measured({Tier.NVME: (0.002, 6.5e9)}, 40e-6)
    assert cost.load_s(Tier.NVME, CHUNK) == pytest.approx(0.002 + CHUNK / 6.5e9)
    assert cost.load_s(Tier.NVME, 200 * CHUNK) == pytest.approx(0.002 + 200 * CHUNK / 6.5e9)
    assert cost.prefill_s(256) == pytest.approx(256 * 40e-6)


def test_loads_of_one_size_put_all_time_on_the_bytes() -> None:
    cost = LoadCost()
    for _ in range(MIN_MEASURED):
        cost.observe_load(Tier.DRAM, CHUNK, 0.01)
    assert cost.load_s(Tier.DRAM, 2 * CHUNK) == pytest.approx(0.02)


def test_a_short_run_is_not_worth_the_latency_of_its_tier() -> None:
    cost = measured({Tier.NVME: (0.05, 6.5e9)}, 40e-6)
    assert cost.worth([Tier.NVME], CHUNK, 256) == 0
    assert cost.worth([Tier.NVME] * 100, CHUNK, 256) == 100


def test_the_run_is_cut_where_a_slow_tier_begins() -> None:
    cost = measured({Tier.DRAM: (1e-5, 50e9), Tier.NVME: (1e-3, 0.5e9)}, 40e-6)
    assert cost.worth([Tier.DRAM] * 4 + [Tier.NVME] * 6, CHUNK, 256) == 4
    assert cost.worth([Tier.NVME] + [Tier.DRAM] * 20, CHUNK, 256) == 21, "DRAM pays for the disk"


@given(
    st.lists(st.sampled_from(COLD), max_size=12),
    st.tuples(st.floats(0, 0.1), st.floats(1e8, 1e11)),
    st.tuples(st.floats(0, 0.1), st.floats(1e8, 1e11)),
    st.floats(1e-7, 1e-3),
    st.sampled_from([1 * MIB, CHUNK]),
)
def test_the_stop_is_the_cheapest_and_of_equal_ones_the_longest(
    tiers: list[Tier],
    dram: tuple[float, float],
    nvme: tuple[float, float],
    prefill_s: float,
    chunk_bytes: int,
) -> None:
    cost = measured({Tier.DRAM: dram, Tier.NVME: nvme}, prefill_s)
    seconds = brute_force(cost, tiers, chunk_bytes, 256)
    stop = cost.worth(tiers, chunk_bytes, 256)
    assert seconds[stop] <= min(seconds) * (1 + 1e-9) + 1e-12
    assert all(s >= seconds[stop] * (1 - 1e-9) - 1e-12 for s in seconds[stop + 1 :])


@given(st.lists(st.sampled_from(COLD), min_size=1, max_size=12))
def test_a_tie_is_loaded(tiers: list[Tier]) -> None:
    cost = LoadCost()
    for _ in range(MIN_MEASURED):
        cost.observe_prefill(256, 0.5)
        for tier in COLD:
            cost.observe_load(tier, CHUNK, 0.5)
    assert cost.worth(tiers, CHUNK, 256) == len(tiers)


def test_one_in_so_many_refusals_loads_all_the_same() -> None:
    cost = measured({Tier.NVME: (0.01, 1e7)}, 40e-6)
    answers = [cost.worth([Tier.NVME] * 3, CHUNK, 256) for _ in range(4 * TRY_EVERY)]
    assert set(answers) == {0, 3}
    assert answers.count(3) == 4


@pytest.mark.parametrize("good_before", [0, 3, 500])
def test_one_stall_does_not_turn_loading_off_for_ever(good_before: int) -> None:
    """Only what is loaded is measured; the bound is in requests that knocked."""
    cost, run = measured({}, 40e-6), [Tier.NVME] * 4
    refused = 0
    for request in range(good_before + 300):
        chunks = cost.worth(run, CHUNK, 256)
        refused += chunks == 0
        if chunks:
            stalled = request == good_before
            cost.observe_load(Tier.NVME, chunks * CHUNK, 30.0 if stalled else 0.02)
    assert refused <= 4 * TRY_EVERY
    assert cost.worth(run, CHUNK, 256) == 4


def test_a_stall_after_good_loads_refuses_nothing() -> None:
    cost = measured({Tier.NVME: (1e-4, 6.5e9)}, 160e-6)
    cost.observe_load(Tier.NVME, 4 * CHUNK, 30.0)
    assert cost.worth([Tier.NVME] * 4, CHUNK, 256) == 4


def test_a_disk_that_got_slow_is_found_out_and_forgiven_when_it_recovers() -> None:
    cost, run = measured({Tier.NVME: (1e-4, 6.5e9)}, 40e-6), [Tier.NVME] * 4

    def serve(requests: int, seconds: float) -> int:
        loaded = 0
        for _ in range(requests):
            if chunks := cost.worth(run, CHUNK, 256):
                loaded += 1
                cost.observe_load(Tier.NVME, chunks * CHUNK, seconds)
        return loaded

    assert serve(400, 2.0) < 80, "a hundred times slower: most of it is computed"
    serve(300, 0.02)
    assert serve(100, 0.02) == 100


def test_a_measured_zero_does_not_stick() -> None:
    cost = LoadCost()
    for seconds in [0.0] * MIN_MEASURED + [0.01] * 200:
        cost.observe_load(Tier.DRAM, CHUNK, seconds)
    assert cost.load_s(Tier.DRAM, CHUNK) == pytest.approx(0.01, rel=0.01)


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 40), st.floats(0, 1e4), st.sampled_from(COLD)), max_size=60
    )
)
def test_estimates_never_fall_below_nothing(loads: list[tuple[int, float, Tier]]) -> None:
    cost = LoadCost()
    for num_bytes, seconds, tier in loads:
        cost.observe_load(tier, num_bytes, seconds)
    for tier in COLD:
        expected = [cost.load_s(tier, size) for size in (1, CHUNK, 1 << 40)]
        assert expected[0] is None or expected == sorted(s for s in expected if s is not None)
        assert all(s is None or s >= 0.0 for s in expected)


def test_what_cannot_have_been_measured_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_bytes is 0"):
        LoadCost().observe_load(Tier.DRAM, 0, 1.0)
    with pytest.raises(ValueError, match="num_tokens is -1"):
        LoadCost().observe_prefill(-1, 1.0)
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="seconds is"):
            LoadCost().observe_prefill(1, seconds)
