"""The cache of a prompt whose first tokens are still on their way when generate() gets it.

    layer 0   [ restored, arrived ......)[ computed ..)
    layer 1   [ restored, on its way ...)[ computed ..)

A layer is waited for when its KV is first asked for, by whatever is asked on the engine's stream:
the layers before it are computed meanwhile, and the host never waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from ..kernels import PagedKV
from ..tiers.layout import KVLayout
from ..tiers.transfer import CopyJob


class ArrivingKV:
    """Room for the KV of one prompt, filled from its head on; allocated when first used.

    All of the prompt's, not only what is restored: prefill then writes its part behind that. To
    append it otherwise would copy what was restored, and hold it twice while copies are under way.
    """

    def __init__(self, layout: KVLayout, num_tokens: int, device: torch.device) -> None:
        self._layout = layout
        self._room = num_tokens
        self._device = device
        self._jobs: list[CopyJob] = []
        self.num_tokens = 0
        """Restored so far: here, or on their way."""

    @cached_property
    def pages(self) -> PagedKV:
        """A page per token of the prompt."""
        return PagedKV.of_heads([(keys, values) for keys, values in self._layers])

    def extend(self, num_tokens: int, job: CopyJob | None = None) -> None:
        """The next num_tokens pages are written, or will be when `job` is done."""
        self.num_tokens += num_tokens
        self._jobs += [job] if job else []

    def cache(self, config: PretrainedConfig) -> DynamicCache:
        """What generate() continues from. Nothing else is to be written after this."""
        cache = DynamicCache(config=config)
        if self.num_tokens:
            # Jobs keep all layers: those that are done must not be kept by a layer in turn.
            jobs = [job for job in self._jobs if not job.done]
            cache.layers[:] = [
                ArrivingLayer(_Arrival(states, self.num_tokens, index, jobs))
                for index, states in enumerate(self._layers)
            ]
        return cache

    @cached_property
    def _layers(self) -> list[torch.Tensor]:
        """Keys and values of each, (2, 1, num_kv_heads, tokens, head_dim)."""
        layout = self._layout
        shape = (layout.kv_factor, 1, layout.num_kv_heads, self._room, layout.head_dim)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        # Memory allocated in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            # One allocation a layer: each is freed when generate() replaces it.
            return [
                torch.empty(shape, dtype=dtype, device=self._device)
                for _ in range(layout.num_layers)
            ]


@dataclass(frozen=True, slots=True, eq=False)
class _Arrival:
    """states: keys and values with room for the whole prompt. jobs: what still writes them."""

    states: torch.Tensor
    num_tokens: int
    index: int
    jobs: Sequence[CopyJob]

    @property
    def rest(self) -> torch.Tensor:
        """The room behind what is restored."""
        return self.states[..., self.num_tokens :, :]

    def wait(self) -> None:
        for job in self.jobs:
            job.wait_for_layer(self.index)


class ArrivingLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' subclass hook
    """Becomes a plain DynamicLayer when its keys or values are first asked for.

    It has neither attribute until then, so that whatever transformers does with a layer waits
    first: append, crop, reorder, offload, hand out.
    """

    def __init__(self, arrival: _Arrival) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers'
        # Appending nothing sets whatever this version of transformers sets at the first update.
        nothing = arrival.states[..., :0, :]
        super().update(nothing[0], nothing[1])
        del self.keys, self.values
        self._arrival = arrival

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arrival, new = self._arrival, (key_states, value_states)
        if any(_kind(states) != _kind(arrival.rest[0]) for states in new):
            self._arrive()
            return self.update(key_states, value_states, *args, **kwargs)
        # Compute writes behind what the load lane writes: neither waits for the other.
        for place, states in zip(arrival.rest, new, strict=True):
            place.copy_(states)
        return self._arrive(whole=True)

    def get_seq_length(self) -> int:
        return self._arrival.num_tokens

    def reset(self) -> None:
        self._arrive()
        self.reset()

    def __getattr__(self, name: str) -> Any:
        if name not in ("keys", "values"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._arrive()
        return getattr(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """To be copied, or sent elsewhere."""
        self._arrive()
        return self.__reduce_ex__(protocol)

    def _arrive(self, *, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Be a plain layer of what was restored, or of the whole prompt where that is written."""
        arrival = self._arrival
        arrival.wait()
        del self._arrival
        keys, values = arrival.states if whole else arrival.states[..., : arrival.num_tokens, :]
        self.keys, self.values = keys, values
        plain: Any = DynamicLayer
        self.__class__ = plain
        return keys, values


def _kind(states: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return states.shape, states.dtype, states.device
