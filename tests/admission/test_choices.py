import subprocess
import sys

import pytest

from rootcellar.admission.always import Always
from rootcellar.admission.choices import POLICIES, make


@pytest.mark.parametrize("name", POLICIES)
def test_every_name_makes_a_policy_of_its_own(name: str) -> None:
    assert make(name) is not make(name)
    assert len({type(POLICIES[name]()) for name in POLICIES}) == len(POLICIES)


def test_lru_admits_everything() -> None:
    assert isinstance(make("lru"), Always)


def test_a_wrong_name_is_told_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"policy is 'mru', must be one of arc, gated, .*, slru"):
        make("mru")


def test_naming_a_policy_imports_neither_torch_nor_numba() -> None:
    code = (
        "import sys, rootcellar.admission.choices;"
        "sys.exit(bool({'torch', 'numba'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
