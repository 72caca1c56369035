"""A mend for vLLM 0.32's CPU backend, for a process that makes one engine after another.

Before an engine's worker starts, that backend looks at the `vars()` of everything that any module
holds. One object of llvmlite, which numba brings along for the admission policy, has no dict to
give, and the second engine would end in an AttributeError.
"""

import importlib
from collections.abc import Mapping
from typing import Any

_SCANNER = "vllm.triton_utils.dispatcher"


def mend() -> None:
    """Give the scan a `vars` of its own, which takes what has none for an empty one."""
    try:
        scanner = importlib.import_module(_SCANNER)
    except ImportError:  # a build without that backend
        return
    scanner.vars = _vars  # type: ignore[attr-defined]


def _vars(value: Any) -> Mapping[str, Any]:
    try:  # past what a class does when it is asked, such as to warn
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found
