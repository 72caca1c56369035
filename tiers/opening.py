"""Opening a store: everything is checked first, then built from the disk up; undone on failure."""

import logging
import os
from contextlib import ExitStack
from pathlib import Path

import torch

from ..admission.base import AdmissionPolicy, Tier
from .admission_file import AdmissionFile
from .arena import SharedArena
from .chunk_file import file_bytes, supports_o_direct
from .cleaner import Cleaner
from .cold import ColdTiers
from .config import CODECS, StoreConfig
from .cuda_runtime import TorchRuntime, current_device, current_pci_address
from .dram import DramTier
from .events import EventLog
from .flusher import Flusher
from .history import WhyNot
from .io.base import Codec
from .io.open import open_backend
from .layout import KVLayout, Namespace
from .learning import Learning
from .load_times import LoadTimes
from .metrics import Metrics
from .noop import NoNvme
from .numa import gpu_node
from .nvme import NvmeTier
from .offers import Offers
from .pinning import ArenaPinner
from .recover import open_directory
from .trace_recorder import TraceRecorder

log = logging.getLogger(__name__)
PAGE_BYTES = 4096
WRITES_AT_ONCE = 512
"""Handed to the IO side and not done: it serves reads first, so these delay nobody."""


def open_tiers(config: StoreConfig, namespace: Namespace) -> ColdTiers:
    """ValueError for budgets that hold not one chunk or that the machine cannot have; TierError
    or ValueError for a directory that cannot be opened. Nothing is left behind on failure."""
    layout = namespace.layout
    slot_bytes = -(-layout.chunk_bytes // PAGE_BYTES) * PAGE_BYTES
    _check_budgets(config, slot_bytes, file_bytes(layout.chunk_bytes, Codec.RAW))
    policy, o_direct = config.make_policy(), False
    policy.open(_capacity(config, slot_bytes, file_bytes(layout.chunk_bytes, Codec.RAW)))
    write_down = None if config.nvme_path is None else config.write_down
    why_not, metrics, events = WhyNot(), Metrics(), EventLog()
    with ExitStack() as undo:  # undone in reverse: first the IO side, last the lock
        root = recovered = None
        if config.nvme_path is not None:
            root = Path(config.nvme_path).absolute()  # the process may change its directory
            recovered = open_directory(root)
            undo.callback(recovered.lock.close)
        learning = _open_learning(config, policy, root, layout)  # before any order is made
        undo.callback(learning.close)
        node = gpu_node(current_pci_address())
        arena = SharedArena(slot_bytes, config.dram_size // slot_bytes, node)
        undo.callback(arena.close)
        if config.pin_dram and torch.cuda.is_available():
            undo.callback(ArenaPinner(arena, TorchRuntime(current_device())).close)
        order = policy.order(Tier.DRAM)
        dram = DramTier(arena, order, why_not, metrics, events, write_down or "eager")
        nvme: NvmeTier | NoNvme = NoNvme()
        if root is not None and recovered is not None:
            o_direct = _says_o_direct(root)
            io = open_backend(
                config.io,
                root,
                arena,
                lanes=config.io_lanes,
                itemsize=layout.itemsize,
                lock_fd=recovered.lock.fd,
            )
            undo.callback(io.close)
            nvme = NvmeTier(
                root,
                recovered,
                io,
                dram,
                why_not,
                events,
                budget_bytes=config.nvme_size,
                namespace=namespace.digest,
                codec=CODECS[config.codec],
                order=policy.order(Tier.NVME),
            )
            undo.callback(nvme.close)
        offers = Offers(policy, layout, dram, nvme, metrics)
        flusher = Flusher(dram, nvme, layout, why_not, depth=WRITES_AT_ONCE)
        cleaner = Cleaner(dram, nvme, flusher, offers, why_not, arena.num_slots)
        return ColdTiers(
            layout=layout,
            policy=policy,
            arena=arena,
            dram=dram,
            nvme=nvme,
            write_down=write_down,
            offers=offers,
            learning=learning,
            load_times=LoadTimes(layout, config.load_timeout_s),
            flusher=flusher,
            cleaner=cleaner,
            why_not=why_not,
            metrics=metrics,
            events=events,
            o_direct=o_direct,
            release=undo.pop_all(),
        )


def _open_learning(
    config: StoreConfig, policy: AdmissionPolicy, root: Path | None, layout: KVLayout
) -> Learning:
    file = None if root is None else AdmissionFile(root, type(policy).__qualname__)
    recorder = None
    if (path := config.trace_path) is not None:
        try:
            recorder = TraceRecorder(
                path, max_bytes=config.trace_size, chunk_tokens=layout.chunk_tokens
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"trace_path is {path}, which cannot be recorded to: {error}"
            ) from error
    return Learning(policy, file, recorder, layout.chunk_tokens)


def _capacity(config: StoreConfig, slot_bytes: int, chunk_file_bytes: int) -> dict[Tier, int]:
    """How many chunks each tier holds, at least; compressed ones may be more on NVMe."""
    slots = {Tier.DRAM: config.dram_size // slot_bytes}
    if config.nvme_path is not None:
        slots[Tier.NVME] = config.nvme_size // chunk_file_bytes
    return slots


def _says_o_direct(root: Path) -> bool:
    o_direct = supports_o_direct(root)
    if not o_direct:
        log.warning("%s has no O_DIRECT: reads go through the page cache", root)
    return o_direct


def _check_budgets(config: StoreConfig, slot_bytes: int, chunk_file_bytes: int) -> None:
    if config.dram_size < slot_bytes:
        raise ValueError(
            f"dram_bytes is {config.dram_bytes}, must be at least one chunk of {slot_bytes} bytes"
        )
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.dram_size > memory_bytes:
        raise ValueError(
            f"dram_bytes is {config.dram_bytes}, more than this machine's {memory_bytes} bytes"
        )
    if config.nvme_path is not None and config.nvme_size < chunk_file_bytes:
        raise ValueError(
            f"nvme_bytes is {config.nvme_bytes}, must be at least one chunk file of"
            f" {chunk_file_bytes} bytes"
        )
