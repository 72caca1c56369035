"""The connector: vLLM's own offloading connector on our store.

The parent brings hybrid cache groups, preemption fences and chunking. This class reads what the
parent's parts are not told: the engine's configuration, and the whole prefix of each request.
"""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
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
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from .failures import WorkerMeta
from .manager import Manager
from .metrics import unregister_metrics
from .opening import open_store
from .settings import SPEC_MODULE, SPEC_NAME, Settings
from .shape import Shape, blocks_per_chunk, offloaded_groups
from .spec import RootCellarSpec
from .supported import check_engine
from .underway import LoadsUnderWay
from .worker import SlotWorker


class RootCellarConnector(OffloadingConnector):
    """One in the scheduler, which owns the store, and one in every worker."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        settings = _checked(vllm_config)
        groups = offloaded_groups(kv_cache_config)
        blocks = blocks_per_chunk(groups, settings.block_size)
        with_spec = _with_spec(vllm_config, settings, blocks_per_chunk=blocks)
        super().__init__(with_spec, role, kv_cache_config)
        self._told_at_reset: list[KVCacheEvent] = []
        if role is not KVConnectorRole.SCHEDULER:
            return
        # Left to itself, vLLM fails a request whose load failed. It reads this when we are made.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        config = build_offloading_config(with_spec, kv_cache_config)
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

    @property
    def _slot_worker(self) -> SlotWorker:
        worker = self.connector_worker.worker
        assert isinstance(worker, SlotWorker)
        return worker

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        self._manager.arrived(request.request_id, request.block_hashes, request.lora_request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not request.skip_reading_prefix_cache:
            self._manager.ask(request.request_id, num_computed_tokens)
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return matched

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._manager.runs(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = super().build_connector_meta(self._without_loading(scheduler_output))
        assert isinstance(meta, OffloadingConnectorMetadata)
        for job in meta.store_jobs.values():
            job.src_spec, job.dst_spec = self._manager.only_whole(job.src_spec, job.dst_spec)
        return meta

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that failed are among those that ended, and named again: vLLM then computes what
        they should have brought."""
        loading = dict(self.connector_worker._load_jobs)  # without those that ended, afterwards
        results = super().get_transfer_results(finished_req_ids)
        failed = self._slot_worker.failed_jobs & loading.keys()
        results.failed_recving = {loading[job_id] for job_id in failed}
        return results

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        # Follows get_transfer_results() in every step: what failed is told with its end.
        told = super().build_connector_worker_meta()
        if told is None:
            return None
        return WorkerMeta(told.completed_jobs, told.transfer_stats, self._slot_worker.take_failed())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        # Before the parent completes what all ranks have told of: each as a success.
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, WorkerMeta):
            self._tell_failures(meta.failed_jobs)
        super().update_connector_output(connector_output)

    def _tell_failures(self, job_ids: set[int]) -> None:
        jobs = self.scheduler._jobs
        for job_id in job_ids & jobs.keys():  # a reset forgot the others
            job = jobs[job_id]
            if job.is_store:
                self._manager.store_failed(job.keys, job.req_id)
            else:
                self._manager.load_failed(job.req_id)

    def reset_cache(self) -> bool | None:
        """The parent forgets the blocks of every chunk, so what is gone is told before it does."""
        take = super().take_events
        self._manager.when_reset = lambda: self._told_at_reset.extend(take())
        reset: bool | None = super().reset_cache()
        return reset

    def take_events(self) -> Iterable[KVCacheEvent]:
        told, self._told_at_reset = self._told_at_reset, []
        yield from told
        yield from super().take_events()

    def _without_loading(self, output: SchedulerOutput) -> SchedulerOutput:
        """A request that was preempted and loads its chunks anew in one step is told to the parent
        as loading only: it takes preempted requests to have nothing but stores under way."""
        loading = {job.req_id for job in self.scheduler._current_batch_load_jobs.values()}
        preempted = output.preempted_req_ids or set()
        if loading.isdisjoint(preempted):
            return output
        return dataclasses.replace(output, preempted_req_ids=set(preempted) - loading)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Where vLLM captures CUDA graphs, this is the first that it asks, and a wrong knob is
        refused here: before it loads weights."""
        Settings.from_extra_config(extra_config)
        needed: bool = super().requires_piecewise_for_cudagraph(extra_config)
        return needed

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Asked for before memory is set aside for KV: refuses what cannot be served."""
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
            _with_spec(vllm_config, _checked(vllm_config)),
            metric_types,
            labelnames,
            per_engine_labelvalues,
        )


def _checked(vllm_config: VllmConfig) -> Settings:
    check_engine(vllm_config)
    return Settings.from_extra_config(_extra_config(vllm_config))


def _extra_config(vllm_config: VllmConfig) -> Mapping[str, Any]:
    extra: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
    return extra


def _with_spec(vllm_config: VllmConfig, settings: Settings, **more: Any) -> VllmConfig:
    """The configuration, naming our spec; the engine's own, which others read, stays as it is."""
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    extra = {k: v for k, v in _extra_config(vllm_config).items() if k != "block_size"}
    extra["self_describing_kv_events"] = settings.self_describing_kv_events
    extra |= {"spec_name": SPEC_NAME, "spec_module_path": SPEC_MODULE, **more}
    changed.kv_transfer_config.kv_connector_extra_config = extra
    return changed
