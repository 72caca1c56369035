"""vLLM finds the connector by its name alone, and engines without it notice nothing."""

import importlib.metadata
import subprocess
import sys

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from rootcellar.connector.vllm import RootCellarConnector, plugin

NAMED = KVTransferConfig(kv_connector="RootCellarConnector", kv_role="kv_both")

STRANGER = """
import sys
import rootcellar.connector.vllm
rootcellar.connector.vllm.installed_version = lambda: "0.99.0"
from rootcellar.connector.vllm.plugin import register
register()
register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
for loaded in ("connector", "manager", "worker", "settings"):
    assert f"rootcellar.connector.vllm.{loaded}" not in sys.modules, loaded
assert not [name for name in sys.modules if name.startswith("rootcellar.tiers")]
try:
    KVConnectorFactory.get_connector_class_by_name("RootCellarConnector")
except RuntimeError as refusal:
    print(refusal)
"""


def test_a_name_is_enough_to_find_the_connector() -> None:
    plugin.register()
    assert KVConnectorFactory.get_connector_class(NAMED) is RootCellarConnector


def test_registering_again_changes_nothing() -> None:
    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class(NAMED) is RootCellarConnector


def test_the_installed_package_announces_it_to_vllm() -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="rootcellar")
    assert [entry.load() for entry in found] == [plugin.register]


def test_a_vllm_that_is_not_supported_is_troubled_only_when_it_asks_for_us() -> None:
    answer = subprocess.run(
        [sys.executable, "-P", "-c", STRANGER], capture_output=True, text=True, check=True
    )
    assert "does not support vLLM 0.99.0" in answer.stdout
