"""vLLM runs on the store: `--kv-transfer-config '{"kv_connector": "RootCellarConnector", ...}'`.

The connector is imported when vLLM asks for it, which is before it loads any weights; a version
that it was not tried with is refused then.
"""

from typing import TYPE_CHECKING, Any

from .supported import check_version, installed_version

if TYPE_CHECKING:
    from .connector import RootCellarConnector

__all__ = ["RootCellarConnector"]


def __getattr__(name: str) -> Any:
    if name != "RootCellarConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version(installed_version())
    from .connector import RootCellarConnector

    return RootCellarConnector
