"""Mooncake's traces (kvcache-ai/Mooncake, FAST '25): a request a line, in order of arrival."""

from __future__ import annotations

from .building import BlockRequests
from .fields import Record, ids, number, whole
from .trace import Trace

BLOCK_TOKENS = 512


class Mooncake:
    """Records of timestamp (ms), input_length, output_length and hash_ids: one id for each block of
    512 tokens of the prompt, the last of which may not be full."""

    def __init__(self, first: Record, seed: int) -> None:
        self._requests = BlockRequests(BLOCK_TOKENS)

    @staticmethod
    def reads(record: Record) -> bool:
        return "hash_ids" in record and "timestamp" in record

    def add(self, record: Record) -> None:
        self._requests.add(
            number(record, "timestamp") / 1000,
            whole(record, "input_length"),
            whole(record, "output_length"),
            ids(record, "hash_ids"),
        )

    def trace(self, name: str) -> Trace:
        return self._requests.trace(name, ())
