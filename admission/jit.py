"""Numba's njit with a type that checkers can follow. What is compiled is kept on disk, beside the
source where that is writable."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba

P = ParamSpec("P")
R = TypeVar("R")


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, compiled when first called; it may call others that were passed through here."""
    compiled: Any = numba.njit(cache=True)(function)
    # Numba looks at the age of the function's own file alone, and would go on with what it compiled
    # of those it calls. A numba that keeps its stamp elsewhere shows in the test of this.
    home = Path(function.__code__.co_filename).parent
    compiled._cache._cache_file._source_stamp = _sources(Path(__file__).parent) + _sources(home)
    result: Callable[P, R] = compiled
    return result


@cache
def _sources(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, time of change and size of every module below."""
    found = [(path, path.stat()) for path in sorted(folder.rglob("*.py"))]
    return tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in found)
