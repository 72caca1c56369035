"""The two copies between pages and chunks, and who does them on which device.

    pages  (num_layers, kv_factor, num_slots, num_kv_heads, head_dim)   where the engine reads KV
    chunk  (num_layers, kv_factor, T,         num_kv_heads, head_dim)   contiguous, moves as one
    slots  T token slots of the pages

Bytes are copied as they are, whatever the dtype.
"""

import numpy as np
import numpy.typing as npt
import torch

from . import cpu, torch_index

Slots = npt.NDArray[np.int64]


def gather(pages: torch.Tensor, slots: npt.ArrayLike, out: torch.Tensor) -> None:
    """out[:, :, t] = pages[:, :, slots[t]] for every t; a slot may be given more than once.

    ValueError if a shape, dtype, device or slot does not fit, before anything is written. On a
    GPU this only launches, on the current stream: whoever owns that keeps both tensors alive.
    """
    checked = _checked(pages, slots, out, "out")
    (cpu if out.device.type == "cpu" else torch_index).gather(pages, checked, out)


def scatter(chunk: torch.Tensor, pages: torch.Tensor, slots: npt.ArrayLike) -> None:
    """pages[:, :, slots[t]] = chunk[:, :, t] for every t; slots must differ from each other.

    Raises and launches like `gather`. A repeated slot ends up with any one of its tokens.
    """
    checked = _checked(pages, slots, chunk, "chunk")
    (cpu if chunk.device.type == "cpu" else torch_index).scatter(chunk, pages, checked)


def _checked(pages: torch.Tensor, slots: npt.ArrayLike, chunk: torch.Tensor, name: str) -> Slots:
    array = np.asarray(slots)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"slots are {array.dtype} {array.shape}, must be integers in one row")
    if pages.dim() != 5 or not pages.is_contiguous():
        raise ValueError(f"pages {tuple(pages.shape)} must be contiguous, of five dimensions")
    layers, kv_factor, num_slots, heads, head_dim = pages.shape
    expected = (layers, kv_factor, len(array), heads, head_dim)
    if chunk.shape != expected or not chunk.is_contiguous():
        raise ValueError(f"{name} {tuple(chunk.shape)} must be contiguous {expected}")
    if (chunk.dtype, chunk.device) != (pages.dtype, pages.device):
        raise ValueError(
            f"{name} is {chunk.dtype} on {chunk.device}, pages {pages.dtype} on {pages.device}"
        )
    result = array.astype(np.int64, copy=False)
    # As unsigned, a negative slot is above every bound: one pass checks both ends.
    if len(result) and result.view(np.uint64).max() >= num_slots:
        at = int(np.argmax((result < 0) | (result >= num_slots)))
        raise ValueError(f"slots[{at}] is {result[at]}, must be from 0 to {num_slots - 1}")
    return result
