import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import rootcellar
import rootcellar.bench.doctor as doctor
from rootcellar import KVLayout, Namespace, StoreConfig, TieredStore, chunk_keys, cli
from rootcellar.tiers.chunk_file import SUFFIX
from rootcellar.tiers.errors import StoreLockedError

SCRIPT = Path(sys.executable).with_name("rootcellar")


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rootcellar", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    children: dict[str, Any] = getattr(command, "commands", {})
    if not children:
        yield path, command
    for name, child in children.items():
        yield from leaves(child, (*path, name))


def test_every_command_takes_json_and_says_what_it_does() -> None:
    commands = dict(leaves(typer.main.get_command(cli.app)))
    assert set(commands) == {
        ("bench", "device"),
        ("bench", "hit-latency"),
        ("bench", "radix"),
        ("bench", "vllm-scheduler"),
        ("demo",),
        ("doctor",),
        ("inspect",),
        ("size",),
        ("tune",),
        ("verify",),
    }
    for command in commands.values():
        assert "--json" in [name for option in command.params for name in option.opts]
        assert command.help


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_what_needs_vllm_says_so_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "bench", "vllm-scheduler") == 2
    assert "vLLM is not installed" in capsys.readouterr().err


def test_the_console_script_shows_help_and_version() -> None:
    shown = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert "doctor" in shown.stdout
    shown = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"{rootcellar.__version__}\n"


def test_doctor_in_a_real_process_prints_one_json_document(tmp_path: Path) -> None:
    done = subprocess.run(
        [SCRIPT, "doctor", "--json", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["directory"] == str(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", ["doctor", "inspect", "verify"])
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_directory_that_is_not_there_is_one_line_and_exit_2(
    command: str,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, command, *flags, str(tmp_path / "nowhere")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rootcellar: ")
    assert "nowhere" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "error", [ValueError("two\nlines"), StoreLockedError("two\nlines"), OSError("two\nlines")]
)
def test_an_error_the_user_can_mend_is_one_line_and_exit_2(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(directory: Path) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    assert call(monkeypatch, "doctor", "--json") == 2
    assert capsys.readouterr() == ("", "rootcellar: two lines\n")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: Path) -> dict[str, Any]:
        raise KeyError("ours")

    monkeypatch.setattr(doctor, "run", fail)
    monkeypatch.setattr(sys, "argv", ["rootcellar", "doctor"])
    with pytest.raises(KeyError):
        cli.main()


@pytest.mark.parametrize("num_bad", [0, 1])
def test_json_stands_alone_and_a_bad_finding_is_exit_1(
    num_bad: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"directory": "d", "checks": [], "num_warn": 0, "num_bad": num_bad}

    def noisy(directory: Path) -> dict[str, Any]:
        print("what a library prints")
        return result

    monkeypatch.setattr(doctor, "run", noisy)
    assert call(monkeypatch, "doctor", "--json") == num_bad
    out, err = capsys.readouterr()
    assert json.loads(out) == result
    assert err == "what a library prints\n"


def test_inspect_and_verify_judge_a_real_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def document(*arguments: str, status: int) -> dict[str, Any]:
        assert call(monkeypatch, *arguments, "--json", str(tmp_path)) == status
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    _fill(tmp_path)
    (namespace,) = document("inspect", status=0)["namespaces"]
    assert namespace["chunks"] == 2
    assert document("verify", status=0)["bad"] == []
    victim = next(tmp_path.rglob(f"*{SUFFIX}"))
    with victim.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    assert len(document("verify", status=1)["bad"]) == 1
    assert document("verify", "--repair", status=1)["dropped"] >= 1
    assert document("verify", status=0)["bad"] == []
    assert call(monkeypatch, "inspect", str(tmp_path)) == 0
    assert call(monkeypatch, "verify", str(tmp_path)) == 0
    assert str(tmp_path.name) in capsys.readouterr().out.replace("\n", "")


def _fill(directory: Path) -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")
    ns = Namespace(model="m", revision="r", layout=layout)
    config = StoreConfig(dram_bytes="4MiB", nvme_path=directory, nvme_bytes="8MiB", io="threads")
    with TieredStore(config, ns) as store:
        kv = [torch.zeros(layout.shape(256)) for _ in range(2)]
        assert store.put(chunk_keys(range(512), ns), kv) == 2


def test_tune_answers_with_json_a_table_or_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, page = tmp_path / "chat.jsonl", tmp_path / "report.html"
    request = {"input_length": 1024, "output_length": 9, "hash_ids": [7, 8]}
    lines = [json.dumps({"timestamp": second * 1000} | request) for second in range(4)]
    trace.write_text("\n".join(lines))
    asked = ["tune", str(trace), "--policy", "lru", "--share", "1", "--nvme-share", "0.5"]
    assert call(monkeypatch, *asked, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    (cell,) = document["cells"]
    assert (cell["dram_chunks"], cell["nvme_chunks"], cell["prefix_hit"]) == (2, 1, 0.75)
    assert document["command"] == " ".join(["rootcellar", *asked, "--json"])
    assert call(monkeypatch, *asked) == 0
    assert "75.00" in capsys.readouterr().out
    assert call(monkeypatch, *asked, "--out", str(page)) == 0
    assert f"The report is in {page}." in capsys.readouterr().out
    assert page.read_text().lower().startswith("<!doctype html>")
    assert call(monkeypatch, *asked, "--device", "speed=9") == 2
    assert "speed" in capsys.readouterr().err


def test_size_answers_with_json_or_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "size", "--model", "llama-3.1-8b", "--json") == 0
    assert json.loads(capsys.readouterr().out)["kv"]["bytes_per_token"] == 131072
    assert call(monkeypatch, "size", "--dram", "1GiB") == 0
    assert "8,192" in capsys.readouterr().out
    assert call(monkeypatch, "size", "--model", "nothing-like-it") == 2


def test_wrong_usage_is_exit_2_and_leaves_stdout_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "verify", "--json") == 2
    assert call(monkeypatch, "cellar") == 2
    assert capsys.readouterr().out == ""


def test_progress_writes_nothing_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with cli._progress("working", as_json=False) as progress:
        progress(1, 2)
    assert capsys.readouterr() == ("", "")
