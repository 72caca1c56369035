"""The places that name our packages, tools and versions must agree."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import rootcellar
from rootcellar import KVLayout

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPING: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
PACKAGES = ("tiers", "admission", "connector", "kernels", "bench")


def test_every_package_is_mapped() -> None:
    on_disk = {
        "rootcellar." + p.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for folder in PACKAGES
        for p in (ROOT / folder).rglob("__init__.py")
    }
    assert on_disk | {"rootcellar"} == set(PROJECT["tool"]["setuptools"]["packages"])


def test_links_match_mapping() -> None:
    links = {p.name for p in (ROOT / "rootcellar").iterdir() if p.is_symlink()}
    assert links == set(MAPPING.values()) - {"rootcellar"} == set(PACKAGES)


def test_pyright_looks_through_every_link() -> None:
    included = set(PROJECT["tool"]["pyright"]["include"])
    assert {f"rootcellar/{package}" for package in PACKAGES} <= included


def test_imports_come_from_this_package() -> None:
    assert KVLayout.__module__ == "rootcellar.tiers.layout"


def test_tests_are_no_packages() -> None:
    """With one __init__.py, pytest would import tests/kernels as the top-level `kernels`."""
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_kernels_survives_being_taken_for_hugging_faces() -> None:
    """With the root as working directory, transformers imports our folder to see if it is theirs.

    An import error there reaches the user, and a version could be taken for a supported one.
    """
    source = "import kernels; print(kernels.__file__); assert not hasattr(kernels, '__version__')"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "kernels" / "__init__.py"


def test_the_version_is_said_once() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert importlib.metadata.version("rootcellar") == rootcellar.__version__
    assert f"## [{rootcellar.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_pinned_tools_satisfy_what_the_package_asks_for() -> None:
    pins = re.findall(r"^([a-z-]+)==", (ROOT / "requirements-dev.txt").read_text(), re.M)
    project = PROJECT["project"]
    asked = {re.split(r"[\[>=; ]", name)[0] for name in _requirements(project)}
    assert set(pins) <= asked


def test_every_licence_file_is_there() -> None:
    for name in PROJECT["project"]["license-files"]:
        assert "Apache License" in (ROOT / name).read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_depend_one_way(package: str) -> None:
    allowed = {
        "admission": set[str](),
        "kernels": set[str](),
        "tiers": {"admission", "kernels"},
        "connector": {"tiers", "admission", "kernels"},
        "bench": {"connector", "tiers", "admission", "kernels"},
    }[package]
    for path in (ROOT / package).rglob("*.py"):
        depth = len(path.relative_to(ROOT / package).parts)
        siblings = re.findall(
            rf"^\s*from \.{{{depth + 1}}}({'|'.join(PACKAGES)})\b", path.read_text(), re.M
        )
        assert set(siblings) <= allowed, path
        assert not re.search(r"^\s*(from|import) rootcellar\b", path.read_text(), re.M), path


def _requirements(project: dict[str, Any]) -> list[str]:
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return [*project["dependencies"], *(name for names in extras.values() for name in names)]
