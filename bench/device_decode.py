"""A loop like an engine's: decode steps, one token for each of a batch, as one CUDA graph.

A step reads every weight and the KV of every token once, as a decode step does, and writes the new
token's KV. On the CPU the same step runs without a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from .device_scale import DecodeShape

_MEMORY_SHARE = 0.5
_WARM_UPS = 3
_cuda: Any = torch.cuda  # which is typed in parts only


class DecodeLoop:
    """step() launches a step on the current stream; wait() returns when it is done."""

    def __init__(self, shape: DecodeShape, generator: torch.Generator) -> None:
        device = generator.device
        self.shape = _fitting(shape, device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._layers = [_Layer(shape, dtype, generator) for _ in range(self.shape.num_layers)]
        self._tokens = _random((shape.batch, shape.hidden), dtype, generator)
        self._on_gpu = device.type == "cuda"
        self.step: Callable[[], object] = self._captured().replay if self._on_gpu else self._eager

    def wait(self) -> None:
        """For the stream that steps run on, and no other."""
        if self._on_gpu:
            _cuda.current_stream().synchronize()

    def _eager(self) -> torch.Tensor:
        tokens = self._tokens
        for layer in self._layers:
            tokens = layer.run(tokens)
        return tokens

    def _captured(self) -> Any:
        """A graph of _eager(), in memory of its own."""
        side = _cuda.Stream()
        side.wait_stream(_cuda.current_stream())  # the weights must be written
        with _cuda.stream(side):
            for _ in range(_WARM_UPS):  # libraries must have chosen kernels and workspaces
                self._eager()
        _cuda.current_stream().wait_stream(side)
        graph = _cuda.CUDAGraph()
        with _cuda.graph(graph):
            self._eager()
        return graph


class _Layer:
    def __init__(self, shape: DecodeShape, dtype: torch.dtype, generator: torch.Generator) -> None:
        self._shape = shape
        attended = shape.num_heads * shape.head_dim
        made = attended + 2 * shape.num_kv_heads * shape.head_dim
        cached = (2, shape.batch, shape.num_kv_heads, shape.context_tokens, shape.head_dim)
        self._to_heads = _random((made, shape.hidden), dtype, generator)
        self._from_heads = _random((shape.hidden, attended), dtype, generator)
        self._up = _random((shape.intermediate, shape.hidden), dtype, generator)
        self._down = _random((shape.hidden, shape.intermediate), dtype, generator)
        self._keys, self._values = _random(cached, dtype, generator)

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens + F.linear(self._attend(_normal(tokens)), self._from_heads)
        return tokens + F.linear(F.silu(F.linear(_normal(tokens), self._up)), self._down)

    def _attend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Query heads that share a KV head are rows of one query: each reads its KV once."""
        batch, groups, dim = self._shape.batch, self._shape.num_kv_heads, self._shape.head_dim
        made = F.linear(tokens, self._to_heads).view(batch, -1, dim)
        self._keys[:, :, -1] = made[:, -2 * groups : -groups]
        self._values[:, :, -1] = made[:, -groups:]
        queries = made[:, : -2 * groups].reshape(batch, groups, -1, dim)
        return F.scaled_dot_product_attention(queries, self._keys, self._values).reshape(batch, -1)


def _normal(tokens: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(tokens, tokens.shape[-1:])


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    values = torch.empty(shape, dtype=dtype, device=generator.device)
    return values.normal_(std=1 / math.sqrt(shape[-1]), generator=generator)


def _fitting(shape: DecodeShape, device: torch.device) -> DecodeShape:
    """With as many of its layers as take half of the memory that is free."""
    if device.type == "cpu":
        return shape
    free_bytes, _ = _cuda.mem_get_info(device)
    fitting = int(free_bytes * _MEMORY_SHARE) // _layer_bytes(shape)
    return replace(shape, num_layers=max(1, min(shape.num_layers, fitting)))


def _layer_bytes(shape: DecodeShape) -> int:
    attended, cached = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = shape.hidden * (2 * attended + 2 * cached + 2 * shape.intermediate)
    return 2 * (weights + 2 * shape.batch * shape.context_tokens * cached)
