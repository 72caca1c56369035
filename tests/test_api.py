"""`from rootcellar import …` is the whole public surface, and costs no more than what it names."""

import ast
import os
import pkgutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import rootcellar


def run_python(source: str) -> str:
    env = os.environ | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source], env=env, capture_output=True, check=True
    )
    return done.stdout.decode().strip()


def test_every_public_name_can_be_imported() -> None:
    for name in rootcellar.__all__:
        assert getattr(rootcellar, name) is getattr(rootcellar, name)


def test_all_is_exactly_what_can_be_imported() -> None:
    assert rootcellar.__all__ == sorted(rootcellar.__all__)
    assert dir(rootcellar) == rootcellar.__all__
    assert {*rootcellar._HOME_OF, "__version__"} == set(rootcellar.__all__)


def test_type_checkers_see_the_same_names_from_the_same_homes() -> None:
    tree = ast.parse(Path(rootcellar.__file__).read_text())
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1
    ]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == rootcellar._HOME_OF


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'rootcellar' has no attribute 'Cellar'"):
        rootcellar.Cellar  # noqa: B018 the access itself is what is tested


def test_parts_that_need_no_torch_import_none() -> None:
    modules = ["cli", "tiers.io.base", "tiers.keys", "tiers.layout", "tiers.config"]
    imports = "\n".join(f"import rootcellar.{module}" for module in modules)
    source = f"{imports}\nimport sys; print([m for m in ('torch', 'cupy') if m in sys.modules])"
    assert run_python(source) == "[]"
    source = "import rootcellar, sys; rootcellar.chunk_keys; print('torch' in sys.modules)"
    assert run_python(source) == "False"


def test_every_module_says_what_it_is() -> None:
    for info in pkgutil.walk_packages(rootcellar.__path__, "rootcellar."):
        spec = find_spec(info.name)
        assert spec is not None
        assert spec.origin is not None
        assert ast.get_docstring(ast.parse(Path(spec.origin).read_text())), info.name
