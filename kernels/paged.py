"""Where an engine keeps KV, whatever its layout, as planes of pages; and how a chunk packs them.

    plane  (num_pages, tokens, heads, head_bytes)   bytes; one plane per layer and K or V

The last dimension lies together, the others may have any stride. A chunk of n pages holds plane
after plane, page after page, each page packed:

    chunk  | plane 0: page 0, page 1, ... n-1 | plane 1: page 0, page 1, ... n-1 | ...

Where a page is one token, that is (planes, tokens, heads, head_dim), a chunk of the cold tiers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch


@dataclass(frozen=True, eq=False)
class PagedKV:
    """Views of an engine's memory; owns none of it, but keeps it from being freed.

    Make one per memory and keep it: what a copy has to know of the planes is found out once.

    planes: uint8, all on one device, layer after layer. num_layers divides their number.
    dtype: of the elements, where all planes have the same and it is known.
    ValueError names the plane that is not as above.
    """

    planes: tuple[torch.Tensor, ...]
    num_layers: int = 1
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.num_layers < 1 or not self.planes or len(self.planes) % self.num_layers:
            raise ValueError(
                f"{len(self.planes)} planes for {self.num_layers} layers, must be as many for each"
            )
        for index, plane in enumerate(self.planes):
            _check_plane(index, plane, self.planes[0].device)

    @classmethod
    def of_slots(cls, pages: torch.Tensor) -> Self:
        """A page per token slot of (num_layers, kv_factor, num_slots, num_kv_heads, head_dim)."""
        if pages.dim() != 5:
            raise ValueError(f"pages are {tuple(pages.shape)}, must be of five dimensions")
        tokens = (plane[:, None] for layer in _bytes(pages) for plane in layer)
        return cls(tuple(tokens), len(pages), pages.dtype)

    @classmethod
    def of_heads(cls, layers: Sequence[Sequence[torch.Tensor]]) -> Self:
        """A page per token of each layer's keys and values, (1, num_kv_heads, tokens, head_dim)."""
        wrong = [states.shape for layer in layers for states in layer if states.shape[:-3] != (1,)]
        if wrong or not layers:
            found = f"hold {tuple(wrong[0])}" if wrong else "are none"
            raise ValueError(f"layers {found}, must be (1, num_kv_heads, tokens, head_dim) each")
        planes = [states[0].transpose(0, 1)[:, None] for layer in layers for states in layer]
        return cls(tuple(map(_bytes, planes)), len(layers), planes[0].dtype)

    @classmethod
    def of_rows(cls, rows: Sequence[torch.Tensor]) -> Self:
        """A page per row of opaque bytes (num_pages, page_bytes); all planes count as one layer."""
        return cls(tuple(_bytes(plane)[:, None, None] for plane in rows))

    @property
    def device(self) -> torch.device:
        return self.planes[0].device

    @cached_property
    def num_pages(self) -> int:
        """Pages that every plane has."""
        return min(plane.shape[0] for plane in self.planes)

    def layer(self, index: int) -> range:
        """The planes of one layer."""
        each = len(self.planes) // self.num_layers
        return range(index * each, (index + 1) * each)

    def part(self, planes: range) -> "PagedKV":
        """Those planes alone, as one layer; the same object each time."""
        if planes not in self._parts:
            chosen = self.planes[planes.start : planes.stop]
            self._parts[planes] = PagedKV(chosen, dtype=self.dtype)
        return self._parts[planes]

    def chunk_bytes(self, pages_per_chunk: int, planes: range | None = None) -> int:
        """Of a chunk, or of those planes' part of it, which lies together."""
        part = self if planes is None else self.part(planes)
        return pages_per_chunk * part._page_bytes

    @cached_property
    def _page_bytes(self) -> int:
        """Of one page of all planes, packed."""
        return sum(map(page_bytes, self.planes))

    @cached_property
    def _parts(self) -> dict[range, "PagedKV"]:
        return {}


def page_bytes(plane: torch.Tensor) -> int:
    """Of one page, packed."""
    return plane.shape[1] * plane.shape[2] * plane.shape[3]


def stacked(planes: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same planes, in order, as (planes, num_pages, tokens, heads, head_bytes): as many at a
    time as lie evenly apart in one memory."""
    start = 0
    while start < len(planes):
        first, stop = planes[start], start + 1
        apart = 0 if stop == len(planes) else _apart(first, planes[stop])
        while apart and stop < len(planes) and _apart(planes[stop - 1], planes[stop]) == apart:
            stop += 1
        shape, strides = (stop - start, *first.shape), (apart, *first.stride())
        yield first.as_strided(shape, strides, first.storage_offset())
        start = stop


def _apart(plane: torch.Tensor, other: torch.Tensor) -> int:
    """Bytes from a plane to a later one of the same form and memory; 0 if it is not one."""
    alike = plane.shape == other.shape and plane.stride() == other.stride()
    if not alike or plane.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return 0
    return max(0, int(other.storage_offset()) - int(plane.storage_offset()))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.uint8)


def _check_plane(index: int, plane: torch.Tensor, device: torch.device) -> None:
    if (
        plane.dim() != 4
        or plane.dtype != torch.uint8
        or plane.stride(3) != 1
        or not page_bytes(plane)
    ):
        raise ValueError(
            f"planes[{index}] is {plane.dtype} {tuple(plane.shape)} with strides {plane.stride()},"
            " must be uint8 of four dimensions, the last of stride 1, at least a byte a page"
        )
    if plane.device != device:
        raise ValueError(f"planes[{index}] is on {plane.device}, planes[0] on {device}")
