"""Charts put what was measured where it belongs, inside their frame, and say it in words too."""

import re
from itertools import pairwise, product
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootcellar.bench.tune.charts_hits import hit_curve, hits_and_writes
from rootcellar.bench.tune.charts_time import MAX_BARS, first_token, tiers_over_time
from rootcellar.bench.tune.markup import Html, element, join, prose
from rootcellar.bench.tune.points import trace_names
from rootcellar.bench.tune.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    plain_scale,
    share_scale,
    size_scale,
    standing_lines,
    time_scale,
)

from .documents import GIB, Document, cell, curve, document, documents, whole

CHARTS = (hit_curve, hits_and_writes, tiers_over_time, first_token)
NUMBER = r"-?\d+(?:\.\d+)?"


def _drawn(made: Document, chart: int = 0, trace: str = "day.jsonl") -> ElementTree.Element:
    figure = CHARTS[chart](made, trace, "name")
    assert figure is not None
    return ElementTree.fromstring(figure)


def _picture(figure: ElementTree.Element) -> ElementTree.Element:
    return next(svg for svg in figure.iter("svg") if svg.get("role") == "img")


def _of_class(root: ElementTree.Element, class_: str) -> list[ElementTree.Element]:
    return [node for node in root.iter() if class_ in (node.get("class") or "").split()]


def _places(root: ElementTree.Element) -> list[tuple[float, float]]:
    """Of the markers: where they are translated to."""
    found = [re.findall(NUMBER, mark.get("transform", "")) for mark in _of_class(root, "mark")]
    return [(float(place[0]), float(place[1])) for place in found]


def _line(root: ElementTree.Element, class_: str) -> list[tuple[float, float]]:
    numbers = [float(n) for n in re.findall(NUMBER, _of_class(root, class_)[0].get("d", ""))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


@given(st.floats(1e3, 1e15), st.floats(1, 1e6))
def test_a_log_scale_keeps_order_ends_and_room_between_ticks(low: float, times: float) -> None:
    scale = size_scale(low, low * times)
    _check(scale, LEFT, RIGHT)
    assert scale(low) == pytest.approx(LEFT)
    assert 1 <= len(scale.ticks) <= 6
    assert all(scale(b) - scale(a) > 50 for (a, _), (b, _) in pairwise(scale.ticks))


@given(st.floats(0, 1))
def test_shares_start_at_zero_and_end_at_a_tick_above_the_highest(highest: float) -> None:
    scale = share_scale(highest)
    _check(scale, BOTTOM, TOP)
    assert scale.ticks[0] == (0, "0 %")
    assert highest <= scale.ticks[-1][0] + 1e-9
    assert scale.ticks[-1][0] <= 1
    assert 2 <= len(scale.ticks) <= 6


@given(st.floats(1e-6, 1e9))
def test_plain_scales_hold_what_they_are_made_for(highest: float) -> None:
    for scale in (plain_scale(highest), time_scale(highest)):
        _check(scale, LEFT, RIGHT)
        assert scale.high >= highest * (1 - 1e-9)
        assert 2 <= len(scale.ticks) <= 6


def _check(scale: Scale, start: float, stop: float) -> None:
    places = [scale(value) for value, _ in scale.ticks]
    assert places == sorted(places, reverse=start > stop)
    assert all(min(start, stop) - 1e-6 <= place <= max(start, stop) + 1e-6 for place in places)
    assert scale(scale.low - 1) == pytest.approx(start)
    assert scale(scale.high * 2) == pytest.approx(stop)


@settings(max_examples=50)
@given(documents())
def test_every_chart_of_any_document_is_whole_and_inside_its_picture(made: Document) -> None:
    for name in trace_names(made):
        for chart in CHARTS:
            figure = chart(made, name, "name")
            if figure is not None:
                _check_picture(ElementTree.fromstring(figure))


def _check_picture(figure: ElementTree.Element) -> None:
    picture = _picture(figure)
    _, top, width, height = (float(n) for n in re.findall(NUMBER, picture.get("viewBox", "")))
    named = (picture.get("aria-labelledby") or "").split()
    assert [node.get("id") for node in list(picture)[:2]] == named
    assert all(len("".join(node.itertext())) > 3 for node in list(picture)[:2])
    for node in picture.iter():
        for key, most in (("x", width), ("x1", width), ("x2", width), ("cx", width)):
            assert 0 <= float(node.get(key, 0)) <= most, (node.tag, node.attrib)
        for key in ("y", "y1", "y2", "cy"):
            assert top <= float(node.get(key, top)) <= top + height, (node.tag, node.attrib)
        assert "nan" not in str(node.attrib)
    for x, y in _places(picture):
        assert LEFT - 0.1 <= x <= RIGHT + 0.1
        assert TOP - 0.1 <= y <= BOTTOM + 0.1


def test_points_stand_in_order_of_their_size_and_hits() -> None:
    cells = [cell("gated", dram_gib=4**n, hit=0.05 + 0.07 * n) for n in range(4)]
    places = _places(_picture(_drawn(document(cells))))
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    steps = [b[0] - a[0] for a, b in pairwise(places)]
    assert max(steps) - min(steps) < 0.3  # equal ratios of size are equal distances


def test_a_point_on_a_curve_is_drawn_on_it_and_the_optimal_curve_above_lru() -> None:
    curves = [curve("lru", 4000), curve("optimal", 1000)]
    hit = curves[0]["hit"][30]
    size_gib = curves[0]["chunks"][30] * 64 / 1024
    made = document([cell("gated", dram_gib=size_gib, hit=hit)], curves=curves)
    figure = _drawn(made)
    (place,) = _places(_picture(figure))
    lru, optimal = _line(figure, "lru"), _line(figure, "optimal")
    assert min(abs(x - place[0]) + abs(y - place[1]) for x, y in lru) < 0.5
    assert all(high[1] <= low[1] for low, high in zip(lru, optimal, strict=True))
    assert lru[0][0] == LEFT
    assert TOP < lru[0][1] < BOTTOM - 1
    assert lru[-1][0] == pytest.approx(RIGHT)


def test_lru_of_one_tier_is_its_curve_and_of_two_tiers_a_point() -> None:
    cells = [cell("lru"), cell("lru", nvme_gib=100), cell("opt")]
    assert len(_places(_picture(_drawn(document(cells, curves=[curve("lru", 900)]))))) == 1
    assert len(_places(_picture(_drawn(document(cells))))) == 2


def test_knee_budget_and_recommendation_are_marked() -> None:
    figure = _drawn(whole())
    words = "".join(figure.itertext())
    assert "knee 800 GiB" in words
    assert "your budget 64 GiB" in words
    assert len(_of_class(_picture(figure), "ring")) == 1
    knee, budget = _of_class(_picture(figure), "knee")[0], _of_class(figure, "budget")[0]
    assert float(knee.get("x1", 0)) > float(budget.get("x1", 0))


def test_no_standing_line_runs_through_the_words_of_the_other() -> None:
    for one, other in product(range(int(LEFT), int(RIGHT) + 1, 8), repeat=2):
        drawn = standing_lines([(one, "w" * 16, "knee"), (other, "w" * 16, "budget")])
        root = ElementTree.fromstring(element("g", drawn))
        lines, labels = list(root.iter("line")), list(root.iter("text"))
        for line, label in ((lines[0], labels[1]), (lines[1], labels[0])):
            x, at = float(line.get("x1", 0)), float(label.get("x", 0))
            start, stop = (at, at + 126) if label.get("text-anchor") == "start" else (at - 126, at)
            higher = float(line.get("y1", 0)) < float(label.get("y", 0)) - 9
            assert not (higher and start < x < stop), (one, other)
            assert start >= 0
            assert stop <= WIDTH


def test_the_spread_of_seeds_is_drawn_from_the_lowest_to_the_highest() -> None:
    cells = [cell(hit=hit, seed=seed) for seed, hit in enumerate((0.1, 0.2, 0.3))]
    figure = _drawn(document(cells))
    (low, high), (place,) = _line(figure, "spread"), _places(_picture(figure))
    assert low[0] == high[0] == place[0]
    assert low[1] - place[1] == pytest.approx(place[1] - high[1], abs=0.2)
    assert low[1] > high[1]


def test_policies_have_one_marker_in_both_charts_and_are_told_apart_without_colour() -> None:
    made = whole()
    markers = []
    for chart in (0, 1):
        keys = list(_of_class(_drawn(made, chart), "legend")[0])
        signs = {"".join(key.itertext()).split()[-1]: list(key.iter("path")) for key in keys}
        markers.append({name: sign[0].get("d") for name, sign in signs.items() if sign})
    assert markers[0]["default"] == markers[1]["default"]
    assert len(set(markers[0].values())) == len(markers[0]) >= 3


def test_writes_are_in_tb_a_day_only_if_all_points_know_it() -> None:
    known = [cell("default", 64, 1024, nvme_tb_per_day=12.0), cell("lru", 64, 1024)]
    assert "per chunk asked for" in "".join(_drawn(document(known), 1).itertext())
    known[1]["nvme_tb_per_day"] = 9.0
    assert "a day" in "".join(_drawn(document(known), 1).itertext())
    assert hits_and_writes(document([cell()]), "day.jsonl", "name") is None


def test_twice_the_hits_and_writes_are_twice_as_far_from_the_corner() -> None:
    cells = [
        cell(policy, 64, 1024, hit=hit, nvme_tb_per_day=writes)
        for policy, hit, writes in (("gated", 0.15, 40.0), ("default", 0.3, 80.0))
    ]
    (x, y), (far, high) = _places(_picture(_drawn(document(cells), 1)))
    assert far - LEFT == pytest.approx(2 * (x - LEFT), abs=0.3)
    assert BOTTOM - high == pytest.approx(2 * (BOTTOM - y), abs=0.3)


def test_the_drives_rating_is_drawn_where_it_is_near() -> None:
    def rating(worn: float) -> list[ElementTree.Element]:
        wear: dict[str, Any] = {"nvme_tb_per_day": 7.68 * worn, "nvme_dwpd": worn}
        return _of_class(_drawn(document([cell("default", 64, 1024, **wear)]), 1), "budget")

    assert len(rating(3.0)) == 1
    assert len(rating(0.6)) == 1
    assert rating(0.1) == []


def test_areas_are_stacked_and_end_where_the_trace_does() -> None:
    made = document([cell(nvme_gib=100, hit=0.4)])
    figure = _drawn(made, 2)
    dram, nvme = _line(figure, "dram"), _line(figure, "nvme")
    assert max(x for x, _ in dram) == pytest.approx(RIGHT, abs=0.1)
    assert {y for _, y in dram} & {BOTTOM}
    assert min(y for _, y in nvme) < min(y for _, y in dram)
    assert {place for place in dram if place[1] < BOTTOM} <= set(nvme)
    assert "from NVMe" in "".join(figure.itertext())
    assert "from NVMe" not in "".join(_drawn(document([cell()]), 2).itertext())
    assert tiers_over_time(document([cell(timeline=[])]), "day.jsonl", "name") is None


def test_bars_are_as_long_as_their_times_and_not_too_many() -> None:
    times: dict[str, Any] = {"ttft_p95_no_cache_s": 4.0, "ttft_p50_s": None}
    cells = [cell(f"policy{n}", ttft_p95_s=2.0, **times) for n in range(MAX_BARS + 3)]
    figure = _drawn(document(cells), 3)
    widths = [float(bar.get("width", 0)) for bar in _of_class(figure, "bar")]
    assert len(widths) == MAX_BARS + 1
    assert widths[1] == pytest.approx(widths[0] / 2, abs=0.1)
    assert "median" not in "".join(figure.itertext())
    assert float(_picture(figure).get("viewBox", "").split()[-1]) < HEIGHT


def test_text_is_escaped_unless_it_is_markup() -> None:
    hostile = "<b>\"&'\x00\udcff\x85"
    made = element("p", hostile, element("b", "x"), title=hostile, class_="y", hidden=None)
    root = ElementTree.fromstring(made)
    assert root.text == root.get("title") == "<b>\"&'\ufffd\ufffd\ufffd"
    assert root.attrib.keys() == {"title", "class"}
    assert [child.tag for child in root] == ["b"]
    assert join(Html("<i></i>"), "<") == "<i></i>&lt;"
    made.encode()


def test_no_line_breaks_between_a_number_and_its_unit() -> None:
    assert prose("about 64 GiB or 5 %") == "about 64\N{NO-BREAK SPACE}GiB or 5\N{NO-BREAK SPACE}%"


def test_points_of_no_size_are_left_out_of_a_log_axis() -> None:
    assert hit_curve(document([cell(dram_gib=0)]), "day.jsonl", "name") is None
    assert hit_curve(document([cell(dram_gib=1 / GIB)]), "day.jsonl", "name") is not None
