"""The connector: vLLM's own offloading connector on our store.

The parent brings hybrid cache groups, preemption fences and chunking. This class reads what the
parent's parts are not told: the engine's configuration, and the whole prefix of each request.
"""

import copy
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    PromMetric,
    PromMetricT,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from .manager import Manager
from .metrics import unregister_metrics
from .opening import open_store
from .settings import Settings
from .shape import Shape, blocks_per_chunk, offloaded_groups
from .spec import RootCellarSpec
from .supported import check_engine
from .underway import LoadsUnderWay


class RootCellarConnector(OffloadingConnector):
    """One in the scheduler, which owns the store, and one in every worker."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        settings = _checked(vllm_config)
        groups = offloaded_groups(kv_cache_config)
        blocks = blocks_per_chunk(groups, settings.block_size)
        super().__init__(_with_spec(vllm_config, blocks_per_chunk=blocks), role, kv_cache_config)
        if role is not KVConnectorRole.SCHEDULER:
            return
        config = build_offloading_config(
            _with_spec(vllm_config, blocks_per_chunk=blocks), kv_cache_config
        )
        shape = Shape(
            groups,
            blocks,
            tokens_per_hash=config.cache.tokens_per_hash,
            hbm_chunks=kv_cache_config.num_blocks // blocks,
        )
        self._manager.open(
            open_store(vllm_config, kv_cache_config, settings, RootCellarSpec(config), shape),
            shape,
            timeout_s=settings.load_timeout_s,
            events=config.enable_kv_cache_events,
        )
        if self.scheduler._chunks_being_loaded is not None:
            self.scheduler._chunks_being_loaded = LoadsUnderWay(lambda: self._manager.num_hits)

    @property
    def _manager(self) -> Manager:
        manager = self.scheduler.manager
        assert isinstance(manager, Manager)
        return manager

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        self._manager.arrived(request.request_id, request.block_hashes, request.lora_request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._manager.ask(request.request_id, num_computed_tokens)
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return matched

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        assert isinstance(meta, OffloadingConnectorMetadata)
        for job in meta.store_jobs.values():
            job.src_spec, job.dst_spec = self._manager.only_whole(job.src_spec, job.dst_spec)
        return meta

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Asked for before weights are loaded, so a wrong configuration is refused here."""
        _checked(vllm_config)
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        unregister_metrics()
        return super().build_prom_metrics(
            _with_spec(vllm_config), metric_types, labelnames, per_engine_labelvalues
        )


def _checked(vllm_config: VllmConfig) -> Settings:
    check_engine(vllm_config)
    return Settings.from_extra_config(_extra_config(vllm_config))


def _extra_config(vllm_config: VllmConfig) -> Mapping[str, Any]:
    extra: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
    return extra


def _with_spec(vllm_config: VllmConfig, **more: Any) -> VllmConfig:
    """The configuration, naming our spec; the engine's own, which others read, stays as it is."""
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    extra = {k: v for k, v in _extra_config(vllm_config).items() if k != "block_size"}
    extra.setdefault("self_describing_kv_events", True)  # events name the engine's own blocks
    extra |= {"spec_name": "RootCellarSpec", "spec_module_path": f"{__package__}.spec", **more}
    changed.kv_transfer_config.kv_connector_extra_config = extra
    return changed
