"""Where a transfer's chunks lie in the shared DRAM arena: what the scheduler tells the workers."""

from dataclasses import dataclass

from vllm.v1.kv_offload.base import LoadStoreSpec

from ...tiers.arena import ArenaAddress


@dataclass(frozen=True, slots=True)
class SlotSpec(LoadStoreSpec):
    """One arena slot per chunk of the transfer, group by group, in the order of the engine's
    blocks. Pickled into the step's metadata, so it is small and holds no memory itself."""

    arena: ArenaAddress
    slots: tuple[int, ...]
