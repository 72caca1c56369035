"""What vLLM's offloading is told to use: our manager in the scheduler, our workers' copies."""

from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from .manager import Manager
from .metrics import metric_definitions
from .worker import make_worker


class RootCellarSpec(OffloadingSpec):
    """Made by the connector, once per role, with sizes that both sides compute alike."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.replicated_layout = config.replicated_layout
        self.rank_bytes: int = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        """Of one rank's slice of a slot."""

    @property
    def chunk_bytes(self) -> int:
        """Of a slot: the slices of all ranks, or the one they have in common."""
        num_slices: int = 1 if self.replicated_layout else self.config.parallel.world_size
        return self.rank_bytes * num_slices

    def get_manager(self) -> OffloadingManager:
        return Manager()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return make_worker(
            kv_caches,
            blocks_per_chunk=self.blocks_per_chunk,
            rank=self.config.parallel.rank,
            rank_bytes=self.rank_bytes,
            replicated=self.replicated_layout,
        )
