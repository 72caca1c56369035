"""vLLM's own scheduler over ranks whose model is a hash, and whose copies run late or not at all.

A page holds what its block's whole prefix hashes to. Before a rank computes anything it checks all
pages that the scheduler says are there: whatever was stored, loaded or given up, it must never see
another byte.
"""

import copy
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rootcellar.connector.vllm.connector import RootCellarConnector
from rootcellar.connector.vllm.manager import Manager
from rootcellar.connector.vllm.pages import PageLayout
from rootcellar.tiers.toy_device import ToyDevice

from .engine_configs import cache, engine
from .engines import transfer_config
from .toy_pages import worker_on

NUM_RANKS = 2
BLOCK_TOKENS = 128
BLOCKS_PER_CHUNK = 2
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
CACHE = cache(num_blocks=60, num_kv_heads=1)
NUM_LAYERS = len(CACHE.kv_cache_tensors[0].layers)
PAGE_BYTES = CACHE.kv_cache_groups[0].kv_cache_spec.page_size_bytes
RANK_BYTES = BLOCKS_PER_CHUNK * NUM_LAYERS * PAGE_BYTES

Work = Sequence[tuple[Request, range]]
"""The tokens of each request that a step computes."""


def config_of(model: Path, dram_chunks: int) -> VllmConfig:
    """Of an engine that prefills two chunks in a step."""
    knobs = {"dram_bytes": f"{dram_chunks * NUM_RANKS * RANK_BYTES}B"}
    config = engine(
        model,
        block_size=BLOCK_TOKENS,
        tensor_parallel_size=NUM_RANKS,
        max_num_batched_tokens=2 * CHUNK_TOKENS,
        async_scheduling=False,
        kv_transfer_config=KVTransferConfig(**transfer_config(knobs)),
    )
    config.cache_config.num_gpu_blocks = CACHE.num_blocks
    return config


class Engine:
    def __init__(self, config: VllmConfig, random: Random) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler = Scheduler(config, CACHE, StructuredOutputManager(config), BLOCK_TOKENS)
        self.ranks = [Rank(config, index, random) for index in range(NUM_RANKS)]
        self._gather = KVOutputAggregator(NUM_RANKS)
        self._num_requests = 0

    @property
    def connector(self) -> RootCellarConnector:
        connector = self.scheduler.connector
        assert isinstance(connector, RootCellarConnector)
        return connector

    @property
    def manager(self) -> Manager:
        manager = self.connector.scheduler.manager
        assert isinstance(manager, Manager)
        return manager

    def ask(self, prompt: list[int], num_tokens: int = 2) -> Request:
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        request = Request(
            str(self._num_requests), prompt, sampling, None, block_hasher=self._hasher
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, where no request runs."""
        self.scheduler.reset_prefix_cache()

    def step(self) -> None:
        output = self.scheduler.schedule()
        work = list(self._work(output))
        tables = {r.request_id: self._blocks(r.request_id) for r, _ in work}
        outputs = [rank.step(output, work, tables) for rank in self.ranks]
        gathered = self._gather.aggregate(outputs)
        assert gathered is not None
        self.scheduler.update_from_output(output, gathered)

    def run(self) -> None:
        """Until nothing is left to do."""
        for _ in range(1000):
            if not self._busy:
                return
            self.step()
        raise AssertionError("it never comes to rest")

    def check_at_rest(self) -> None:
        stats, theirs = self.manager.store.stats(), self.connector.scheduler
        assert (stats["open_loads"], stats["dram"]["slots_pinned"]) == (0, 0)
        assert not theirs._jobs
        assert not theirs._req_status
        assert not self.manager._requests
        assert not self.manager._computes_all
        self.manager.store.check_integrity()

    def close(self) -> None:
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()

    @property
    def _busy(self) -> bool:
        requests = self.scheduler.has_unfinished_requests(), self.scheduler.has_finished_requests()
        return any(requests) or bool(self.connector.scheduler._jobs)

    def _work(self, output: SchedulerOutput) -> Iterator[tuple[Request, range]]:
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            stop = request.num_computed_tokens
            yield request, range(stop - count, stop)

    def _blocks(self, request_id: str) -> list[int]:
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return list(blocks)


class Rank:
    """One worker: calls the connector in vLLM's order."""

    def __init__(self, config: VllmConfig, index: int, random: Random) -> None:
        self._index = index
        self.device = ToyDevice(random.randrange, compute="caller")
        mine = copy.copy(config)
        mine.parallel_config = copy.copy(config.parallel_config)
        mine.parallel_config.rank = index
        self.connector = RootCellarConnector(mine, KVConnectorRole.WORKER, CACHE)
        self.pages = torch.zeros((NUM_LAYERS, CACHE.num_blocks, PAGE_BYTES), dtype=torch.int8)
        layout = PageLayout(
            CanonicalKVCaches(
                [CanonicalKVCacheTensor(pages, PAGE_BYTES) for pages in self.pages],
                [[CanonicalKVCacheRef(layer, PAGE_BYTES) for layer in range(NUM_LAYERS)]],
            ),
            blocks_per_chunk=BLOCKS_PER_CHUNK,
            rank=index,
            rank_bytes=RANK_BYTES,
            replicated=False,
        )
        theirs = self.connector.connector_worker
        assert theirs is not None
        theirs.worker = worker_on(self.device, layout)

    def step(
        self, output: SchedulerOutput, work: Work, tables: dict[str, list[int]]
    ) -> ModelRunnerOutput:
        connector, metadata = self.connector, output.kv_connector_metadata
        assert metadata is not None
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        for request, computed in work:
            self._compute(request, computed, tables[request.request_id])
        connector.start_load_kv(None)
        connector.wait_for_save()
        ended = connector.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_recving=ended.finished_recving,
            failed_recving=ended.failed_recving,
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        requests = [request for request, _ in work]
        return ModelRunnerOutput(
            req_ids=[request.request_id for request in requests],
            req_id_to_index={request.request_id: i for i, request in enumerate(requests)},
            sampled_token_ids=[_sampled(request, computed) for request, computed in work],
            kv_connector_output=told,
        )

    def _compute(self, request: Request, computed: range, blocks: list[int]) -> None:
        tokens = request.all_token_ids
        for index in range(computed.stop // BLOCK_TOKENS):
            stop = (index + 1) * BLOCK_TOKENS
            pages, expected = self.pages[:, blocks[index]], self._content(tokens[:stop])
            if stop > computed.start:
                pages[:] = expected
            else:
                assert torch.equal(pages, expected), "KV that nobody computed"

    def _content(self, prefix: Sequence[int]) -> torch.Tensor:
        """(NUM_LAYERS, PAGE_BYTES) of the last block."""
        name = hashlib.sha256(repr((self._index, list(prefix))).encode()).digest()
        repeats = NUM_LAYERS * PAGE_BYTES // len(name)
        content: torch.Tensor = torch.frombuffer(bytearray(name), dtype=torch.int8).repeat(repeats)
        return content.view(NUM_LAYERS, PAGE_BYTES)


def _sampled(request: Request, computed: range) -> list[int]:
    return [7] if computed.stop >= request.num_tokens else []
