"""Gather and scatter with torch alone, for every device that has no kernels of its own.

Arguments come checked. Copies run on the current stream.
"""

import numpy as np
import numpy.typing as npt
import torch

Slots = npt.NDArray[np.int64]


def gather(pages: torch.Tensor, slots: Slots, out: torch.Tensor) -> None:
    torch.index_select(_words(pages), 2, _index(slots, pages.device), out=_words(out))


def scatter(chunk: torch.Tensor, pages: torch.Tensor, slots: Slots) -> None:
    _words(pages).index_copy_(2, _index(slots, pages.device), _words(chunk))


def _index(slots: Slots, device: torch.device) -> torch.Tensor:
    # A copy, made before this returns: the caller may change `slots` while the kernel waits.
    return torch.tensor(slots, device=device)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, the widest that fit: not every dtype can be indexed."""
    last_dim_bytes = tensor.shape[-1] * tensor.element_size()
    return tensor.detach().view(torch.uint8 if last_dim_bytes % 8 else torch.int64)
