"""Slots of the arena as tensors, and the check of what a caller wants to put there."""

import numpy as np
import torch

from .arena import SharedArena
from .layout import KVLayout


class SlotTensors:
    """Views of an arena's slots; they share memory with the slot and own nothing."""

    def __init__(self, arena: SharedArena, layout: KVLayout) -> None:
        self._arena = arena
        self._layout = layout
        self._dtype: torch.dtype = getattr(torch, layout.dtype)

    def view(self, slot: int, num_tokens: int) -> torch.Tensor:
        """(num_layers, kv_factor, num_tokens, num_kv_heads, head_dim) at the start of the slot."""
        # Through numpy: its arrays keep the memory mapped, torch.frombuffer's tensors do not.
        flat = np.frombuffer(
            self._arena.buffer,
            np.uint8,
            num_tokens * self._layout.bytes_per_token,
            slot * self._arena.slot_bytes,
        )
        # What is made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            return torch.from_numpy(flat).view(self._dtype).view(self._layout.shape(num_tokens))

    def check(self, tensors: list[torch.Tensor]) -> None:
        """ValueError or TypeError naming the first tensor that is no chunk of the layout.

        Only the last may have fewer tokens than a whole chunk.
        """
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"tensors[{index}] is a {type(tensor).__name__}, must be a Tensor")
            if tensor.dtype != self._dtype:
                raise ValueError(
                    f"tensors[{index}] has dtype {tensor.dtype}, must be {self._dtype}"
                )
            whole = self._layout.chunk_tokens
            num_tokens = tensor.shape[2] if tensor.dim() == 5 else whole
            partial = index == len(tensors) - 1 and 1 <= num_tokens < whole
            expected = self._layout.shape(num_tokens if partial else whole)
            if tuple(tensor.shape) != expected:
                raise ValueError(
                    f"tensors[{index}] has shape {tuple(tensor.shape)}, must be {expected}"
                )
