"""One prompt answered by the plain model and through the cache, timed the same way."""

import time
from dataclasses import dataclass

import torch
from transformers import StoppingCriteriaList

from ..connector.served import FirstToken
from ..connector.transformers import CachedModel
from .demo_model import DemoModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The tokens generated, and seconds from the call to the first of them."""

    reply: list[int]
    ttft_s: float


def answer_uncached(demo_model: DemoModel, prompt: torch.Tensor) -> Answer:
    """The model on its own; prompt is (1, tokens)."""
    first_token = FirstToken()
    start_s = time.perf_counter()
    tokens = demo_model.model.generate(
        prompt,
        **demo_model.arguments(prompt),
        stopping_criteria=StoppingCriteriaList([first_token]),
    )
    return Answer(reply=_reply(tokens, prompt), ttft_s=first_token.at_s - start_s)


def answer_cached(
    demo_model: DemoModel, cached: CachedModel, prompt: torch.Tensor, salt: str | None = None
) -> Answer:
    """The same through the cache, which times itself."""
    tokens = cached.generate(prompt, salt=salt, **demo_model.arguments(prompt))
    assert cached.last is not None
    return Answer(reply=_reply(tokens, prompt), ttft_s=cached.last.ttft_s)


def _reply(tokens: torch.Tensor, prompt: torch.Tensor) -> list[int]:
    return [int(token) for token in tokens[0, prompt.shape[1] :]]
