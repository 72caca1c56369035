"""Opens the store of one engine, in the scheduler's process."""

from pathlib import Path

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from ...tiers.chunk_file import WEIGHTS
from ...tiers.store import TieredStore
from .identity import engine_namespace
from .settings import Settings
from .shape import Shape
from .spec import RootCellarSpec


def open_store(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    settings: Settings,
    spec: RootCellarSpec,
    shape: Shape,
) -> TieredStore:
    """Data-parallel replicas are engines of their own, with a store each."""
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
    return TieredStore(config, namespace)
