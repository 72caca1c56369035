import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from rootcellar import cli
from rootcellar.bench import device_check, device_exact, device_facts, device_hits
from rootcellar.bench.demo_serving import Answer, answer_cached
from rootcellar.bench.device_budget import Part
from rootcellar.bench.device_scale import DRY
from rootcellar.bench.device_section import Findings, Site

SMALL = replace(DRY, block_steps=5, prompt_chunks=2, most_rounds=1)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, steps = tmp_path_factory.mktemp("device"), list[tuple[int, int]]()
    document = device_check.run(
        folder,
        dry_run=True,
        seed=7,
        scale=SMALL,
        command=["rootcellar", "bench", "device", "--dry-run"],
        progress=lambda done, total: steps.append((done, total)),
    )
    assert steps == sorted(steps)
    assert steps[-1] == (1000, 1000)
    assert os.listdir(folder) == []
    found: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    return found


def only(monkeypatch: pytest.MonkeyPatch, **sections: Any) -> None:
    """Let these functions be all sections."""
    module = ModuleType("rootcellar.bench.device_made_up")
    vars(module).update(sections)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made_up = {name: ("device_made_up", name, 1) for name in sections}
    monkeypatch.setattr(device_check, "SECTIONS", made_up)


def statuses(document: dict[str, Any]) -> dict[str, str]:
    return {section["name"]: section["status"] for section in document["sections"]}


def test_a_dry_run_goes_through_every_section(smoke: dict[str, Any]) -> None:
    assert smoke["num_failed"] == 0
    found = statuses(smoke)
    assert list(found) == list(device_check.SECTIONS)
    assert found.pop("sanitizer") == "skipped"
    assert set(found.values()) == {"done"}
    assert all(section["rows"] for section in smoke["sections"] if section["status"] == "done")
    for section in smoke["sections"]:
        assert all(row.keys() == section["rows"][0].keys() for row in section["rows"])


def test_a_dry_run_says_so_and_judges_no_speed(smoke: dict[str, Any]) -> None:
    assert smoke["dry_run"] is True
    targets = [target for section in smoke["sections"] for target in section["targets"]]
    assert len(targets) == 8
    assert {target["verdict"] for target in targets} == {"not judged"}


def test_the_document_says_where_and_how_it_was_made(smoke: dict[str, Any]) -> None:
    assert smoke["command"] == ["rootcellar", "bench", "device", "--dry-run"]
    assert smoke["seed"] == 7
    assert smoke["environment"]["device"] == "cpu"
    assert smoke["environment"]["versions"]["torch"] == torch.__version__


def test_hits_are_served_by_the_tiers_they_are_named_after(smoke: dict[str, Any]) -> None:
    section = next(section for section in smoke["sections"] if section["name"] == "hits")
    loaded = {row["measured"]: row["loaded_tokens"] for row in section["rows"]}
    assert loaded == {"computed": 0, "DRAM hit": 512, "NVMe hit": 512}


def test_the_table_shows_every_section_and_target(smoke: dict[str, Any]) -> None:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(device_check.table(smoke))
    shown = captured.get()
    assert "no speed is judged" in shown
    for section in smoke["sections"]:
        assert f"\n{section['name']} (" in shown
        for target in section["targets"]:
            assert target["what"] in shown


def test_a_section_that_fails_is_told_of_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def burning(site: Site, part: Part) -> Findings:
        raise RuntimeError("the device is on fire")

    def fine(site: Site, part: Part) -> Findings:
        return Findings(notes=["all well"])

    only(monkeypatch, burning=burning, fine=fine)
    document = device_check.run(tmp_path, dry_run=True)
    assert document["num_failed"] == 1
    assert statuses(document) == {"burning": "failed", "fine": "done"}
    assert "RuntimeError: the device is on fire" in document["sections"][0]["error"]
    console = Console(width=160)
    with console.capture() as captured:
        console.print(device_check.table(document))
    assert "the device is on fire" in captured.get()


def test_a_section_that_cannot_be_imported_fails_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only(monkeypatch, fine=lambda site, part: Findings())
    sections = {"gone": ("device_gone", "measure", 1), **device_check.SECTIONS}
    monkeypatch.setattr(device_check, "SECTIONS", sections)
    assert statuses(device_check.run(tmp_path, dry_run=True)) == {"gone": "failed", "fine": "done"}


def test_bytes_that_differ_fail_a_dry_run_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_exact, "gather", lambda *given, **how: None)
    monkeypatch.setattr(device_check, "SECTIONS", {"exact": ("device_exact", "measure", 1)})
    (section,) = device_check.run(tmp_path, dry_run=True)["sections"]
    assert section["status"] == "failed"
    assert not section["error"]
    assert "gather: blocks" in section["wrong"]


def test_a_hit_with_other_tokens_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(model: Any, cached: Any, prompt: Any) -> Answer:
        served = answer_cached(model, cached, prompt)
        return replace(served, reply=[*served.reply[:-1], -1])

    monkeypatch.setattr(device_hits, "answer_cached", answer)
    site = Site(device=torch.device("cpu"), directory=tmp_path, seed=0, scale=SMALL)
    found = device_hits.measure(site, Part(60, lambda fraction: None))
    assert found.wrong == ["tokens of a DRAM hit", "tokens of a NVMe hit"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_is_missing_and_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rootcellar", "bench", "device", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "CUDA" in told.err
    assert "--dry-run" in told.err


@pytest.mark.parametrize(
    ("cuda", "available", "cupy", "named"),
    [
        (None, False, False, "built without CUDA"),
        ("13.0", False, False, "no CUDA device"),
        ("13.0", True, False, r"rootcellar\[cuda13\]"),
        ("12.8", True, False, r"rootcellar\[cuda12\]"),
    ],
)
def test_what_is_missing_is_named(
    cuda: str | None, available: bool, cupy: bool, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: cupy or None)
    with pytest.raises(ValueError, match=named):
        device_facts.device_to_measure(dry_run=False)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"minutes": 0.0}, "minutes is 0.0"),
        ({"minutes": float("nan")}, "minutes is nan"),
        ({"directory": Path("/nowhere/at/all")}, "directory is /nowhere/at/all"),
    ],
)
def test_a_wrong_argument_is_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        device_check.run(**{"dry_run": True, **wrong})


def test_the_command_prints_one_document_and_fails_if_a_section_did(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def noisy(site: Site, part: Part) -> Findings:
        print("not for standard output")
        return Findings(wrong=["one byte"] if site.seed else [])

    only(monkeypatch, noisy=noisy)
    for seed, code in (("0", 0), ("1", 1)):
        arguments = ["bench", "device", str(tmp_path), "--dry-run", "--json", "--seed", seed]
        monkeypatch.setattr(sys, "argv", ["rootcellar", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code or 0) == code
        printed = capsys.readouterr()
        document = json.loads(printed.out)
        assert document["num_failed"] == code
        assert document["command"] == ["rootcellar", *arguments]
        assert json.dumps(document["sections"][0]) in printed.err.splitlines()
