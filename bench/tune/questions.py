"""What a replay asks the policy, and a count of what the answers refused."""

from collections import Counter
from dataclasses import replace

from ...admission.base import AdmissionPolicy, Answer, Boundary, Chain, Decision, Offer


class Questions:
    """chunk_bytes: what the policy is told that writing one chunk costs."""

    def __init__(self, policy: AdmissionPolicy, chunk_bytes: int) -> None:
        self.refusals: Counter[str] = Counter()
        """Chunks by boundary and reason."""
        self._policy = policy
        self._chunk_bytes = chunk_bytes

    def ask(self, boundary: Boundary, chain: Chain, start: int, free: int) -> Decision:
        """With a stop that says all: `start` unless something is admitted. Refused chunks are
        counted."""
        decision = self._decide(boundary, chain, start, free)
        self.refuse(boundary, decision.reason, len(chain) - decision.stop)
        return decision

    def ask_path(self, path: Chain, free: int) -> Decision:
        """For chunks that can go onto NVMe only with all before them in `path`."""
        decision = self._decide(Boundary.ONTO_NVME, path, 0, free)
        self.refuse(Boundary.ONTO_NVME, decision.reason, len(path) - decision.stop)
        return decision

    def refuse(self, boundary: Boundary, reason: str, num_chunks: int) -> None:
        if num_chunks:
            self.refusals[f"{boundary}: {reason}"] += num_chunks

    def _decide(self, boundary: Boundary, chain: Chain, start: int, free: int) -> Decision:
        write_bytes = (len(chain) - start) * self._chunk_bytes
        decision = self._policy.decide(Offer(boundary, chain, start, write_bytes, free))
        admitted = decision.answer is Answer.ADMIT
        return replace(
            decision, stop=max(start, min(decision.stop, len(chain))) if admitted else start
        )


def worth_of(decision: Decision, index: int) -> float | None:
    """Of the chunk `index` after the first that was offered."""
    return decision.worth[index] if decision.worth else None
