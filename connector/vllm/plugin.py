"""The `vllm.general_plugins` entry point: with it, `kv_connector_module_path` may be left out.

vLLM calls it in every process, whether or not it was told to use us, so it only leaves a name and
a path behind; what they lead to is imported when an engine asks for it, and refuses there what it
cannot serve.
"""

import contextlib
import sys

CONNECTOR = "RootCellarConnector"


def register() -> None:
    """Make CONNECTOR known to vLLM. Does nothing the second time."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # Raised for a name that is taken: by us, in an earlier call.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR, __package__, CONNECTOR)
    if "llvmlite" in sys.modules:  # a store was used here before the engine
        from .kernel_scan import mend

        mend()
