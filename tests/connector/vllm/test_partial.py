"""Stores from which vLLM left blocks out keep their whole groups, and nothing else."""

from vllm.v1.kv_offload.base import GPULoadStoreSpec

from rootcellar.connector.vllm.partial import keep_groups, whole_groups
from rootcellar.connector.vllm.slots import SlotSpec
from rootcellar.tiers.arena import ArenaAddress

ARENA = ArenaAddress(1, 2, 4096, 10)


def test_a_group_is_whole_when_every_chunk_has_all_its_blocks() -> None:
    blocks = GPULoadStoreSpec([1, 2, 3, 4, 5, 6, 7], [4, 3, 0], [0, 1, 0])
    assert whole_groups(blocks, [2, 2, 0], 2) == [True, False, True]


def test_the_other_groups_keep_their_blocks_and_slots() -> None:
    blocks = GPULoadStoreSpec([1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 3, 2], [0, 1, 4])
    slots = SlotSpec(ARENA, (10, 11, 12, 13, 14))
    kept_blocks, kept_slots = keep_groups(blocks, slots, [2, 2, 1], [True, False, True])
    assert kept_blocks.block_ids.tolist() == [1, 2, 3, 4, 8, 9]
    assert list(kept_blocks.group_sizes) == [4, 0, 2]
    assert list(kept_blocks.block_indices) == [0, 1, 4]
    assert kept_slots == SlotSpec(ARENA, (10, 11, 14))
