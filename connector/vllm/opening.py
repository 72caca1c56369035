"""Opens the store of one engine, in the scheduler's process."""

import logging
from pathlib import Path

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from ...tiers.chunk_file import WEIGHTS
from ...tiers.store import TieredStore
from . import kernel_scan
from .identity import engine_namespace
from .settings import Settings
from .shape import Shape
from .spec import RootCellarSpec

log = logging.getLogger(__name__)


def open_store(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    settings: Settings,
    spec: RootCellarSpec,
    shape: Shape,
) -> TieredStore:
    """Data-parallel replicas are engines of their own, with a store each."""
    share_log()
    kernel_scan.mend()  # before the policy brings numba
    parallel = vllm_config.parallel_config
    config = settings.store_config(parallel.data_parallel_index, parallel.data_parallel_size)
    path = None if config.nvme_path is None else Path(config.nvme_path)
    namespace = engine_namespace(
        vllm_config,
        kv_cache_config,
        chunk_bytes=spec.chunk_bytes,
        chunk_tokens=shape.chunk_tokens,
        weights_id=settings.weights_id,
        durable=path is not None,
        weights_cache=None if path is None else path / WEIGHTS,
    )
    store = TieredStore(config, namespace)
    dram, nvme = store.stats()["dram"], store.stats()["nvme"]
    found = f"{nvme['chunks']} chunks in {path}" if nvme else "no NVMe"
    log.info(
        "rootcellar: %d slots of %d bytes in DRAM, %s, namespace %s",
        dram["slots"],
        dram["slot_bytes"],
        found,
        namespace.digest.hex()[:16],
    )
    return store


def share_log() -> None:
    """vLLM shows its own loggers only: what ours say goes the same way."""
    ours, theirs = logging.getLogger("rootcellar"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers, ours.propagate = theirs.handlers, theirs.propagate
        ours.setLevel(theirs.level)
