"""How much KV a model makes, and how many tokens each tier holds; what HBM has left for a cache.

HBM holds the weights, a reserve, the KV of the running batch, and what is left: the engine's own
prefix cache. Prompts of the batch are counted as if none shared anything.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from ...tiers.config import parse_bytes
from .models import ModelShape, kv_shape

RESERVE_SHARE = 0.1
"""Of HBM, for activations, CUDA graphs and fragmentation; what vLLM leaves unless told."""

_GIB = 1 << 30


def run(
    model: str,
    *,
    kv_dtype: str = "auto",
    gpu_gb: float = 80.0,
    gpus: int = 1,
    dram: int | str = "64GiB",
    nvme: int | str = "1TiB",
    concurrency: int = 32,
    context: int = 8192,
    chunk_tokens: int = 256,
) -> dict[str, Any]:
    """A JSON document.

    model: a preset, a config.json or a model's folder. gpu_gb: HBM of each GPU, in GiB. gpus: of
    one tensor-parallel group. dram, nvme: bytes, or sizes such as "64GiB". concurrency sequences
    of context tokens each make the running batch. ValueError names a wrong argument or field.
    """
    for name, value in (
        ("gpu_gb", gpu_gb),
        ("gpus", gpus),
        ("concurrency", concurrency),
        ("context", context),
        ("chunk_tokens", chunk_tokens),
    ):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} is {value}, must be above 0")
    shape = kv_shape(model, kv_dtype)
    tiers = {"dram": parse_bytes("dram", dram), "nvme": parse_bytes("nvme", nvme)}
    return {
        "model": _model(shape),
        "kv": _kv(shape, chunk_tokens),
        "hbm": _hbm(shape, int(gpu_gb * _GIB), gpus, concurrency, context),
        "tiers": {name: _tier(shape, size, chunk_tokens) for name, size in tiers.items()},
    }


def table(result: dict[str, Any]) -> Table:
    model, kv, hbm = result["model"], result["kv"], result["hbm"]
    view = Table(title=f"{model['name']}, KV in {kv['dtype']}", caption=_caption(result))
    view.add_column("")
    view.add_column("size", justify="right")
    view.add_column("tokens", justify="right")
    view.add_row("KV of a token", _size(kv["bytes_per_token"]))
    if kv["bytes_per_token_past_window"] != kv["bytes_per_token"]:
        view.add_row("... past the window", _size(kv["bytes_per_token_past_window"]))
    if kv["state_bytes"]:
        view.add_row("State of a sequence, no KV", _size(kv["state_bytes"]))
    view.add_row("A chunk", _size(kv["chunk_bytes"]), f"{kv['chunk_tokens']:,}")
    view.add_row("A GiB", "", f"{kv['tokens_per_gib']:,}", end_section=True)
    of = f"{hbm['gpus']} x " if hbm["gpus"] > 1 else ""
    view.add_row(f"HBM, {of}{_size(hbm['total_bytes'] / hbm['gpus'])}", _size(hbm["total_bytes"]))
    view.add_row("- weights", _size(hbm["weight_bytes"]))
    view.add_row(f"- reserve, {RESERVE_SHARE:.0%}", _size(hbm["reserve_bytes"]))
    batch = f"{hbm['concurrency']:,} x {hbm['context']:,}"
    view.add_row(f"- running batch, {batch}", _size(hbm["batch_bytes"]), f"{hbm['batch_tokens']:,}")
    left = "= left for a prefix cache" if hbm["fits"] else "= missing"
    tokens = f"{hbm['cache_tokens']:,}"
    view.add_row(left, _size(abs(hbm["left_bytes"])), tokens, end_section=True)
    for name, tier in result["tiers"].items():
        view.add_row(name.upper(), _size(tier["bytes"]), f"{tier['tokens']:,}")
    return view


def _model(shape: ModelShape) -> dict[str, Any]:
    parameters = shape.parameters
    return {
        "name": shape.name,
        "parameters": parameters.total,
        "active_parameters": parameters.active,
        "weight_bytes": shape.weight_bytes,
        "weight_source": shape.weight_source,
    }


def _kv(shape: ModelShape, chunk_tokens: int) -> dict[str, Any]:
    return {
        "dtype": shape.kv_dtype,
        "bytes_per_token": shape.bytes_per_token,
        "bytes_per_token_past_window": shape.bytes_per_token_past_window,
        "state_bytes": shape.state_bytes,
        "chunk_tokens": chunk_tokens,
        "chunk_bytes": shape.chunk_bytes(chunk_tokens),
        "tokens_per_gib": _GIB // shape.bytes_per_token,
        "layers": [asdict(layers) for layers in shape.layers],
    }


def _hbm(
    shape: ModelShape, gpu_bytes: int, gpus: int, concurrency: int, context: int
) -> dict[str, Any]:
    """Of all GPUs together; KV that every GPU must hold counts once for each (copies)."""
    total, copies = gpus * gpu_bytes, shape.copies(gpus)
    reserve = int(total * RESERVE_SHARE)
    sequence = shape.sequence_bytes(context, gpus)
    before_batch = total - reserve - shape.weight_bytes
    left = before_batch - concurrency * sequence
    return {
        "gpus": gpus,
        "total_bytes": total,
        "weight_bytes": shape.weight_bytes,
        "reserve_bytes": reserve,
        "copies": copies,
        "concurrency": concurrency,
        "context": context,
        "batch_tokens": concurrency * context,
        "batch_bytes": concurrency * sequence,
        "left_bytes": left,
        "fits": left >= 0,
        "cache_tokens": max(0, left) // (shape.bytes_per_token * copies),
        "most_concurrency": max(0, before_batch) // sequence,
    }


def _tier(shape: ModelShape, size_bytes: int, chunk_tokens: int) -> dict[str, Any]:
    """What a tier of so many bytes holds, in whole chunks."""
    chunks = size_bytes // shape.chunk_bytes(chunk_tokens)
    return {"bytes": size_bytes, "chunks": chunks, "tokens": chunks * chunk_tokens}


def _caption(result: dict[str, Any]) -> str:
    model, hbm = result["model"], result["hbm"]
    said = [f"Weights: {model['weight_source']}."]
    if hbm["copies"] > 1:
        said.append(f"The KV is on {hbm['copies']} GPUs at once: it has too few heads to split.")
    if not hbm["fits"]:
        most = hbm["most_concurrency"]
        said.append(f"HBM holds {most:,} sequences of {hbm['context']:,} tokens at most.")
    if result["kv"]["state_bytes"]:
        said.append("Chunks hold no state: a prefix returns only where the engine kept one.")
    return " ".join(said)


def _size(num_bytes: float) -> str:
    size, units = float(num_bytes), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
