#!/usr/bin/env bash
# vLLM with DRAM and NVMe tiers: ./serve.sh [MODEL] [more options of `vllm serve`]
# DRAM, NVME_PATH (made when absent, its parent must be there) and NVME are where and how much.
set -euo pipefail

model="${1:-meta-llama/Llama-3.1-8B-Instruct}"
shift || true

read -r -d '' config <<JSON || true
{
  "kv_connector": "RootCellarConnector",
  "kv_connector_module_path": "rootcellar.connector.vllm",
  "kv_role": "kv_both",
  "kv_connector_extra_config": {
    "dram_bytes": "${DRAM:-16GiB}",
    "nvme_path": "${NVME_PATH:-/var/tmp/rootcellar}",
    "nvme_bytes": "${NVME:-64GiB}"
  }
}
JSON

# --enable-prompt-tokens-details: answers say how many of their prompt's tokens were cached.
exec vllm serve "$model" --enable-prompt-tokens-details --kv-transfer-config "$config" "$@"
