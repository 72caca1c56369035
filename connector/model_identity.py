"""Which model this is, by what it computes: its namespace, and whether it changed since.

The name of a model says nothing (branches move, weights are merged and edited), so the namespace
is made of the weights themselves, the whole configuration and what runs them.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import transformers
import xxhash
from transformers import PreTrainedModel

from ..tiers.layout import KVLayout, Namespace
from .unsupported import UnsupportedModelError

_BOOKKEEPING = ("_name_or_path", "id2label", "label2id", "transformers_version")
"""Fields of a configuration that name things and compute nothing."""

_SAMPLES = 64
"""Elements per tensor that stand for it where reading all of them would be too slow."""


def model_namespace(
    model: PreTrainedModel, layout: KVLayout, *, trust_commit: bool = True
) -> Namespace:
    """The namespace of this model's KV, the same in every process that loads the same weights.

    trust_commit: a hub commit and a sample stand for the weights. False once they may have been
    edited: then, and where there is no commit, every weight is read.
    """
    commit = getattr(model.config, "_commit_hash", None) if trust_commit else None
    described: dict[str, Any] = json.loads(configuration_text(model))
    quantization = described.get("quantization_config")
    extra = {"config": hashlib.sha256(configuration_text(model).encode()).hexdigest()}
    if _hooks(model):
        # What a hook computes nobody can tell: KV made with it is of use to this very model alone.
        extra["hooks"] = os.urandom(16).hex()
    return Namespace(
        model=type(model).__name__,
        revision=f"{commit}+{weights_digest(model, _SAMPLES)}" if commit else weights_digest(model),
        layout=layout,
        rope=_rope_settings(described),
        backend=f"transformers {transformers.__version__}, {run_state(model)}",
        quantization=json.dumps(quantization, sort_keys=True) if quantization else None,
        extra=extra,
    )


def configuration_text(model: PreTrainedModel) -> str:
    """The whole configuration as JSON, less what only names things."""
    described = json.loads(model.config.to_json_string(use_diff=False))
    for name in _BOOKKEEPING:
        described.pop(name, None)
    return json.dumps(described, sort_keys=True)


def run_state(model: PreTrainedModel) -> str:
    """What else decides the bits of KV: attention, dtype, device type, precision of matmul."""
    config = model.config.get_text_config(decoder=True)
    precision = torch.get_float32_matmul_precision()
    return f"{config._attn_implementation}, {model.dtype}, {model.device.type}, {precision}"


def _hooks(model: PreTrainedModel) -> list[int]:
    """The identities of all functions that run with the model's modules."""
    return [
        id(hook)
        for module in model.modules()
        for kind in (module._forward_pre_hooks, module._forward_hooks)
        for hook in kind.values()
    ]


def weights_digest(model: PreTrainedModel, samples: int | None = None) -> str:
    """SHA-256 over name, shape, dtype and xxh3-128 of every parameter and buffer.

    samples: elements read per tensor, evenly spread; None reads all. Raises UnsupportedModelError
    for weights that are not in memory.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(model).items()):
        payload = xxhash.xxh3_128_digest(_bytes_of(tensor if samples is None else _sample(tensor)))
        head = f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
        digest.update(len(head).to_bytes(4, "little") + head + payload)
    return digest.hexdigest()


class ModelWatch:
    """Tells whether a model may compute other KV than when the watch was made.

    In-place edits count up a tensor's version, save through `.data` (as PEFT merges do), so a few
    elements of every tensor are compared too. Unseen go an edit through `.data` that spares all of
    them, what a hook reads, and attributes of modules that no configuration has.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._state = self._now()

    def changed(self) -> bool:
        before, now = self._state, self._now()
        return before[:-1] != now[:-1] or not all(map(torch.equal, before[-1], now[-1]))

    def _now(self) -> tuple[str, str, list[int], list[tuple[int, int, int]], list[torch.Tensor]]:
        tensors = list(_tensors(self._model).values())
        versions = [(id(t), t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]
        samples = list(_samples_by_kind(tensors))
        text, state = configuration_text(self._model), run_state(self._model)
        return text, state, _hooks(self._model), versions, samples


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, non-persistent buffers (RoPE frequencies) included."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors.update(model.named_buffers())
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be cached: {name} is not in memory (meta device)"
            )
    return tensors


def _samples_by_kind(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Samples of all tensors, joined per dtype and device so that few kernels compare them."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(_sample(tensor, 8))
    return (torch.cat(samples).view(torch.uint8) for samples in kinds.values())


def _sample(tensor: torch.Tensor, count: int = _SAMPLES) -> torch.Tensor:
    """Up to `count` elements of the tensor, evenly spread, in one dimension."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // count)][:count]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _rope_settings(described: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE and position settings of a configuration, or of the text part of one."""
    text = described.get("text_config", described)
    names = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
    return {name: cast("Any", text[name]) for name in names if text.get(name) is not None}
