"""Which transfers a worker had to give up, on their way to the scheduler.

vLLM's offloading knows no failure: its worker asserts that every transfer was a success, and its
scheduler completes each as one. So a transfer that failed is told of as ended, and this is told
beside it.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata


@dataclass
class WorkerMeta(OffloadingWorkerMetadata):
    """What one rank tells of in a step, or what all ranks do together."""

    failed_jobs: set[int] = field(default_factory=set[int])
    """Of those completed, by any rank: what they should have written may hold anything."""

    def aggregate(self, other: OffloadingWorkerMetadata) -> "WorkerMeta":
        # vLLM asks the first rank that has anything to tell, so each of them tells it as this.
        assert isinstance(other, WorkerMeta)
        merged = super().aggregate(other)
        failed = self.failed_jobs | other.failed_jobs
        return WorkerMeta(merged.completed_jobs, merged.transfer_stats, failed)
