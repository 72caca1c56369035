"""What README shows must run as it stands there."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SELF_CONTAINED = [block for block in BLOCKS if "CachedModel" not in block]


def test_there_are_examples() -> None:
    assert len(SELF_CONTAINED) == len(BLOCKS) - 1 >= 1


@pytest.mark.parametrize("index", range(len(SELF_CONTAINED)))
def test_an_example_runs(
    index: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(SELF_CONTAINED[index], f"README.md, example {index}", "exec"), {})
    if "are there" in SELF_CONTAINED[index]:
        assert capsys.readouterr().out == "0 tokens are there\n512 tokens are there\n"
