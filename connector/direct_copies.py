"""Whether chunk files are read straight into the memory of a model's GPU: found out at opening."""

import logging
from pathlib import Path

import torch

from ..tiers.chunk_file import file_bytes
from ..tiers.config import StoreConfig
from ..tiers.device import Device
from ..tiers.gpu_direct import DirectLoads
from ..tiers.gpu_file import choose
from ..tiers.io.base import Codec
from ..tiers.store import TieredStore

_log = logging.getLogger(__name__)

_MOST_ROWS = 8
_ROWS_BYTES = 256 << 20
"""Of all rows, at most, where that holds one: the model cannot have what they take."""


def open_direct(
    store: TieredStore, config: StoreConfig, device: Device, place: torch.device
) -> DirectLoads | None:
    """None where chunk files had better go through DRAM. `device` is that of KV on `place`."""
    if config.nvme_path is None or config.codec != "raw":
        return None
    row_bytes = file_bytes(store.layout.chunk_bytes, Codec.RAW)
    choice = choose(Path(config.nvme_path), place, row_bytes)
    used = "used" if choice.reader else "not used"
    _log.info("reading chunk files straight into GPU memory is %s: %s", used, choice.why)
    if choice.reader is None:
        return None
    num_rows = max(1, min(_MOST_ROWS, _ROWS_BYTES // row_bytes))
    try:
        return DirectLoads(
            store, device, choice.reader, num_rows=num_rows, timeout_s=config.load_timeout_s
        )
    except Exception:  # of GPU memory, say, the model left too little
        _log.exception("reading chunk files straight into GPU memory is given up")
        choice.reader.close()
        return None
