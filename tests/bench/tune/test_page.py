"""The page stands alone, is well-formed, keeps file names out of its markup and can be read."""

import json
import re
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from rootcellar.bench.tune import page as module
from rootcellar.bench.tune.advice import advise
from rootcellar.bench.tune.page import render

from .documents import Document, cell, document, documents, whole

XHTML = "{http://www.w3.org/1999/xhtml}"
CSS = (Path(module.__file__).parents[1] / "texts" / "report.css").read_text(encoding="utf-8")


def _tree(made: Document) -> ElementTree.Element:
    return ElementTree.fromstring(render(made).removeprefix("<!DOCTYPE html>"))


def _words(root: ElementTree.Element, tag: str) -> list[str]:
    return [" ".join("".join(node.itertext()).split()) for node in root.iter(XHTML + tag)]


@settings(max_examples=50)
@given(documents())
def test_any_document_gives_a_well_formed_page_that_runs_and_loads_nothing(made: Document) -> None:
    page = render(made)
    page.encode("utf-8")
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    ids = [node.get("id") for node in root.iter() if node.get("id")]
    assert len(ids) == len(set(ids))
    tags = {node.tag.removeprefix(XHTML) for node in root.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "use", "a", "form"}
    for node in root.iter():
        assert not any(name.startswith("on") or name in ("href", "src") for name in node.attrib)
    assert re.findall(r"url\(([^)]*)\)", CSS) == ["#hatch"]
    assert "@import" not in CSS


def test_names_from_outside_stay_words() -> None:
    hostile = "</title></style><script>alert(1)</script>&$title\x01.jsonl"
    made = document(
        [cell(hostile, trace=hostile, refusals={hostile: 3})],
        command=hostile,
        device={hostile: hostile},
        model={"name": hostile},
        advice=hostile,
        made_at=hostile,
    )
    made["traces"][0]["notes"] = [hostile]
    assert "<script" not in render(made)
    shown = hostile.replace("\x01", "\ufffd")
    root = _tree(made)
    for tag in ("h2", "p", "li", "pre", "dt", "dd", "th"):
        assert any(shown in words for words in _words(root, tag)), tag


def test_the_advice_comes_first_as_it_stands_in_the_document() -> None:
    root = _tree(whole() | {"advice": "Buy nothing."})
    assert _words(root, "p")[0] == "Buy nothing."
    unsaid = _words(_tree(whole()), "p")[0]
    assert unsaid == advise(whole())


def test_every_trace_has_its_figures_charts_notes_and_reasons() -> None:
    one, other = whole(), whole(trace="other.jsonl")
    made = {
        name: one[name] + other[name] if isinstance(one[name], list) else one[name] for name in one
    }
    root = _tree(made)
    assert [h for h in _words(root, "h2") if h.endswith("jsonl")] == ["day.jsonl", "other.jsonl"]
    pictures = [svg for svg in root.iter(XHTML + "svg") if svg.get("role") == "img"]
    assert len(pictures) == 8
    figures = _words(root, "strong")
    assert figures[:5] == figures[5:]
    assert [figure.replace("\N{NO-BREAK SPACE}", " ") for figure in figures[2:5]] == [
        "800 GiB",
        "4.2 s → 1.9 s",
        "12 TB",
    ]
    assert _words(root, "li").count("Blocks are of 512 tokens.") == 2
    assert _words(root, "dt").count("never seen") == 2


def test_the_table_has_a_row_per_point_and_no_column_of_unknowns() -> None:
    root = _tree(whole(seeds=3))
    rows = [list(row) for row in root.iter(XHTML + "tr")]
    assert len(rows) == 2 + 9
    heads = ["".join(head.itertext()) for head in rows[0]]
    assert "TB/day" in heads
    assert "regret" not in heads
    assert {len(row) for row in rows[2:]} == {len(heads)}
    assert rows[2][3].text == "10.20 (10.0-10.4)"
    box = next(node for node in root.iter() if node.get("class") == "box")
    assert (box.get("tabindex"), box.get("role")) == ("0", "region")


def test_every_assumption_and_the_command_are_there() -> None:
    root = _tree(whole())
    shown = dict(zip(_words(root, "dt"), _words(root, "dd"), strict=True))
    assert shown["kv_bytes_per_token"] == "131,072"
    assert shown["drive_tb"] == "7.68"
    assert shown["link_gb_s"] == "50"
    assert _words(root, "pre") == ["rootcellar tune day.jsonl"]


def test_a_document_survives_json_and_gives_the_same_page() -> None:
    made = whole(seeds=2)
    assert render(json.loads(json.dumps(made, allow_nan=False))) == render(made)


def test_an_empty_document_is_a_page_that_says_so() -> None:
    assert "No cell was measured." in _words(_tree({}), "p")


def _colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", block))


LIGHT, DARK, PRINT = (_colours(block) for block in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL))


def _luminance(colour: str) -> float:
    """Relative luminance as WCAG 2.2 defines it."""
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK, PRINT], ids=["light", "dark", "print"])
def test_text_and_signs_stand_out_from_what_is_behind_them(colours: dict[str, str]) -> None:
    for words, ground in product(("text", "quiet", "strong"), ("ground", "raised")):
        assert _contrast(colours[words], colours[ground]) >= 4.5, (words, ground)
    for sign in ("accent", "dram", *(f"s{n}" for n in range(6))):
        assert _contrast(colours[sign], colours["ground"]) >= 3, sign
    assert _contrast(colours["dram"], colours["nvme"]) >= 1.8
