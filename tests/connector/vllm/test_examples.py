"""What examples/vllm shows is what there is: the settings, and the names on the dashboard."""

import json
import os
import re
import subprocess
from pathlib import Path

from rootcellar.connector.vllm.metrics import metric_definitions
from rootcellar.connector.vllm.settings import Settings

EXAMPLES = Path(__file__).parents[3] / "examples" / "vllm"
SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def test_the_serve_line_has_settings_that_are_accepted(tmp_path: Path) -> None:
    stand_in = tmp_path / "vllm"
    stand_in.write_text('#!/bin/sh\nfor word; do printf "%s\\0" "$word"; done\n')
    stand_in.chmod(0o755)
    told = subprocess.run(
        [EXAMPLES / "serve.sh", "some/model", "--port", "8001"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DRAM": "1GiB"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    assert told[:2] == ["serve", "some/model"]
    assert told[-3:] == ["--port", "8001", ""]
    config = json.loads(told[told.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "RootCellarConnector"
    assert Settings.from_extra_config(config["kv_connector_extra_config"]).dram_bytes == "1GiB"


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((EXAMPLES / "grafana" / "dashboards" / "rootcellar.json").read_text())
    asked = " ".join(t["expr"] for panel in dashboard["panels"] for t in panel["targets"])
    names = set(re.findall(r"rootcellar:\w+", asked))
    assert names
    assert {SUFFIX.sub("", name) for name in names} <= set(metric_definitions())
