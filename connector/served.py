"""What became of one request: the source of its KV, and when its first token was there."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import StoppingCriteria

from ..tiers.base import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Tokens of one prompt by the source of their KV; the four add up to the prompt.

    ttft_s: seconds from the call to the first generated token.
    """

    hbm: int
    dram: int
    nvme: int
    computed: int
    ttft_s: float

    @classmethod
    def of(cls, num_tokens: int, by_tier: Mapping[Tier, int], ttft_s: float) -> Self:
        """A prompt of num_tokens, of which each tier served so many and the rest was computed."""
        found = {tier.value: by_tier.get(tier, 0) for tier in Tier}
        return cls(**found, computed=num_tokens - sum(found.values()), ttft_s=ttft_s)


class FirstToken(StoppingCriteria):
    """Never stops generate; notes when the first token was there, and calls `each_step` at all."""

    def __init__(self, each_step: Callable[[], object] = lambda: None) -> None:
        self.at_s = 0.0
        """By time.perf_counter; 0 until the first token is there."""
        self._each_step = each_step

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if not self.at_s:
            # Reading the token waits for the device: until then it is only queued, not there.
            input_ids[0, -1].item()
            self.at_s = time.perf_counter()
        self._each_step()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
