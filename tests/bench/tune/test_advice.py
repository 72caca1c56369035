"""The advice never contradicts what was measured, and says nothing of what was not."""

import re
from typing import Any

from hypothesis import given

from rootcellar.bench.tune.advice import NOTHING_MEASURED, advise, advise_trace
from rootcellar.bench.tune.choice import (
    SAME,
    WORTH_A_DOUBLING,
    best_hit,
    choose,
    fits,
    lru_hit,
    price,
)
from rootcellar.bench.tune.points import CEILINGS, online, points_of, trace_names
from rootcellar.bench.tune.rounded import share, size

from .documents import GIB, Document, cell, curve, document, documents, knee, whole


@given(documents())
def test_no_cheaper_point_has_the_same_hits_as_the_recommended_one(made: Document) -> None:
    for trace in trace_names(made):
        measured = online(points_of(made, trace))
        chosen = choose(measured)
        assert (chosen is None) == (not measured)
        for point in measured if chosen else ():
            assert chosen is not None
            assert price(point) >= price(chosen) or point.hit < chosen.hit - SAME


@given(documents())
def test_nothing_that_fits_into_the_recommended_tiers_has_more_hits(made: Document) -> None:
    for trace in trace_names(made):
        measured = online(points_of(made, trace))
        chosen = choose(measured)
        for point in measured if chosen else ():
            assert chosen is not None
            assert not fits(point, chosen) or point.hit <= chosen.hit + SAME


@given(documents())
def test_the_sizes_and_hits_in_the_text_are_of_the_recommended_point(made: Document) -> None:
    for trace in trace_names(made):
        said, chosen = advise_trace(made, trace), choose(points_of(made, trace))
        if chosen is None:
            assert said == NOTHING_MEASURED
        elif not said.startswith("Nothing"):
            assert said.startswith(f"With {size(chosen.dram_bytes)} of DRAM")
            assert f"policy {chosen.policy} serves {share(chosen.hit)}" in said


@given(documents())
def test_a_policy_that_knows_the_future_is_never_recommended(made: Document) -> None:
    for trace in trace_names(made):
        chosen = choose(points_of(made, trace))
        assert chosen is None or chosen.policy not in CEILINGS


@given(documents())
def test_advice_is_one_paragraph_of_finished_sentences(made: Document) -> None:
    said = advise(made)
    assert said.endswith(".")
    assert not re.search(r"\b(None|nan|inf)\b", said.partition("policy ")[0])


def test_twice_the_price_has_to_bring_more_than_two_points() -> None:
    def chosen_of(gain: float) -> int:
        cells = [cell(dram_gib=64, hit=0.3), cell(dram_gib=128, hit=0.3 + gain)]
        chosen = choose(points_of(document(cells), "day.jsonl"))
        assert chosen is not None
        return chosen.dram_bytes // GIB

    assert chosen_of(WORTH_A_DOUBLING + 0.001) == 128
    assert chosen_of(WORTH_A_DOUBLING - 0.001) == 64


def test_a_size_that_pays_is_not_skipped_on_the_way_down() -> None:
    cells = [cell(dram_gib=g, hit=h) for g, h in ((1, 0.10), (2, 0.19), (1024, 0.28))]
    chosen = choose(points_of(document(cells), "day.jsonl"))
    assert chosen is not None
    assert chosen.dram_bytes == 2 * GIB


def test_nvme_is_preferred_to_as_many_bytes_of_dram() -> None:
    cells = [cell(dram_gib=1000, hit=0.31), cell(dram_gib=64, nvme_gib=1000, hit=0.30)]
    assert "With 64 GiB of DRAM and 1,000 GiB of NVMe" in advise(document(cells))


def test_among_policies_as_good_the_default_is_taken_and_else_the_best() -> None:
    close = [cell("gated", hit=0.303), cell("default", hit=0.3), cell("lru", hit=0.301)]
    apart = [cell("gated", hit=0.32), cell("default", hit=0.3)]
    assert "policy default serves 30 %" in advise(document(close))
    assert "policy gated serves 32 %" in advise(document(apart))


def test_where_nothing_returns_nothing_is_worth_buying() -> None:
    said = advise(document([cell(hit=0.002)], infinite=0.004))
    assert said.startswith("Nothing is worth buying")
    assert "would serve at most 0.4 % of it." in said
    assert advise(document([cell(hit=0)], infinite=0)).endswith("would serve none of it.")
    assert "worth buying" in advise(document([cell(hit=0.002)], infinite=None))
    assert not advise(document([cell(hit=0.002)], infinite=0.3)).startswith("Nothing")


def test_everything_that_is_known_is_said_once() -> None:
    said = advise(whole())
    for words in (
        "With 64 GiB of DRAM and 1 TiB of NVMe, policy default serves 35 % of all chunks",
        "of what the best possible policy would at that size",
        "LRU would serve 28 % there",
        "Your 64 GiB of DRAM reach 20 %: policy default.",
        "64 GiB of DRAM would cost 15 points.",
        "The knee is at 800 GiB (6.6 M tokens), where LRU reaches 95 %",
        "doubling from there brings 1.2 points",
        "It writes 12 TB a day to NVMe, 1.6 drive writes a day where 1 is what",
        "it takes 2 drives or a write budget",
        "95th percentile falls from 4.2 s to 1.9 s and 25 % of all prefill time is saved",
    ):
        assert said.count(words) == 1, (words, said)


def test_what_is_unknown_is_not_said() -> None:
    made = document([cell(nvme_gib=9)], infinite=None, device=None, model=None)
    tiers = "64 GiB of DRAM and 9 GiB of NVMe"
    assert advise(made) == f"With {tiers}, policy default serves 30 % of all chunks asked for."


def test_several_traces_are_named_each_with_the_gist() -> None:
    cells = [cell(trace="one"), cell(trace="two", hit=0.2), cell("opt", trace="three")]
    said = advise(document(cells, knees=[knee(90 * GIB, "two")]))
    assert said == (
        "one: 30 % hits with 64 GiB of DRAM and policy default. "
        "two: 20 % hits with 64 GiB of DRAM and policy default; the knee is at 90 GiB."
    )


def test_a_drive_that_lasts_is_left_alone_and_a_sparing_policy_named_for_one_that_does_not() -> (
    None
):
    def said_of(worn: float) -> str:
        wear: dict[str, Any] = {"nvme_tb_per_day": 7.68 * worn, "nvme_dwpd": worn}
        return advise(
            document(
                [
                    cell("default", 64, 1024, 0.30, nvme_chunk_writes=100_000, **wear),
                    cell("gated", 64, 1024, 0.27, nvme_chunk_writes=30_000, **wear),
                ]
            )
        )

    assert "0.5 drive writes a day of the 1 it is rated for." in said_of(0.5)
    assert "gated" not in said_of(0.5)
    assert "it takes 39 drives or a write budget." in said_of(38.2)
    assert "Policy gated would write 70 % less and cost 3 points of hits." in said_of(38.2)


def test_a_policy_that_saves_writes_by_giving_up_its_hits_is_not_named() -> None:
    wear: dict[str, Any] = {"nvme_tb_per_day": 70.0, "nvme_dwpd": 9.1}
    cells = [cell("default", 64, 1024, 0.3, **wear)]
    cells += [cell("never", 64, 1024, 0.1, nvme_chunk_writes=0, **wear)]
    assert "never" not in advise(document(cells))


def test_the_spread_over_seeds_is_said() -> None:
    cells = [cell(hit=hit, seed=seed) for seed, hit in enumerate((0.29, 0.30, 0.31))]
    assert "30 % of all chunks asked for (29.0 to 31.0 % over 3 seeds)" in advise(document(cells))


def test_lru_in_one_tier_is_read_from_its_curve_and_in_two_only_from_a_cell() -> None:
    curves = [curve("lru", 1024)]  # 64 GiB are 1024 chunks
    alone = points_of(made := document([cell()], curves=curves), "day.jsonl")[0]
    hit = lru_hit(made, "day.jsonl", alone)
    assert hit is not None
    assert abs(hit - 0.4 * (1 - 2.718281828**-1)) < 0.005
    both = points_of(made := document([cell(nvme_gib=64)], curves=curves), "day.jsonl")[0]
    assert lru_hit(made, "day.jsonl", both) is None


def test_the_best_possible_is_never_under_what_was_reached() -> None:
    made = document([cell(hit=0.39)], curves=[curve("optimal", 1e6)])
    assert best_hit(made, "day.jsonl", points_of(made, "day.jsonl")[0]) == 0.39
    made = document([cell(hit=0.3), cell("opt", hit=0.35)])
    assert best_hit(made, "day.jsonl", points_of(made, "day.jsonl")[0]) == 0.35
