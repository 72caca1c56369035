"""Alibaba's Qwen-Bailian usage traces ("KVCache Cache in the Wild", ATC '25): a request a line."""

from __future__ import annotations

from .building import BlockRequests
from .fields import Record, ids, number, whole
from .trace import Trace

BLOCK_TOKENS = 16


class Bailian:
    """Records of chat_id, parent_chat_id, timestamp (s), input_length, output_length, type, turn
    and hash_ids: one id for each block of 16 tokens of the prompt.

    Chats are not needed: what a chat shares with its parent shows in the ids.
    """

    def __init__(self, first: Record, seed: int) -> None:
        self._requests = BlockRequests(BLOCK_TOKENS)

    @staticmethod
    def reads(record: Record) -> bool:
        return "hash_ids" in record and "chat_id" in record

    def add(self, record: Record) -> None:
        self._requests.add(
            number(record, "timestamp"),
            whole(record, "input_length"),
            whole(record, "output_length"),
            ids(record, "hash_ids"),
        )

    def trace(self, name: str) -> Trace:
        return self._requests.trace(name, ())
