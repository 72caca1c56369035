"""The demo's second process: opens the store that the first one closed and asks again.

Reads {"model", "store", "budgets", "exchanges"} from standard input, where an exchange is a prompt
and the reply of the model without a cache; writes what it found as one line of JSON.
"""

import json
import sys
from typing import Any

import torch

from ..connector.transformers import CachedModel
from .demo import store_config
from .demo_model import load_model
from .demo_serving import answer_cached


def ask_again(spec: dict[str, Any]) -> dict[str, Any]:
    """Tokens by source over all exchanges, and whether every reply is the same."""
    demo_model = load_model(spec["model"])
    budgets = spec["budgets"]
    tokens = {"hbm": 0, "dram": 0, "nvme": 0, "computed": 0}
    identical = True
    config = store_config(spec["store"], budgets)
    with CachedModel(demo_model.model, config, hbm_tokens=budgets["hbm_tokens"]) as cached:
        for exchange in spec["exchanges"]:
            prompt = torch.tensor([exchange["prompt"]], device=demo_model.model.device)
            answer = answer_cached(demo_model, cached, prompt)
            identical &= answer.reply == exchange["reply"]
            for source in tokens:
                tokens[source] += getattr(cached.last, source)
    return {
        "requests": len(spec["exchanges"]),
        **{f"{source}_tokens": count for source, count in tokens.items()},
        "outputs_identical": identical,
    }


if __name__ == "__main__":
    print(json.dumps(ask_again(json.load(sys.stdin))))
