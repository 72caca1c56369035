"""How the copies of a job are cut: each batch fits a staging buffer, and layers may come in turn.

all planes at once    chunks 0 1 | 2 3 | 4
by layer              chunks 0 1 2 3 4 of layer 0 | the same of layer 1 | ...
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from ..kernels.paged import PagedKV
from .movers import Batch, ChunkCopy, row_bytes
from .planes import part_bytes

LAYER_BYTES = 1 << 20
"""Of a chunk, at least, that arrives at once: the link is slow with less."""


def in_batches(
    copies: Sequence[ChunkCopy], staging_bytes: int, *, by_layer: bool = False
) -> Iterator[Batch]:
    """As many copies at once as a buffer has room for. ValueError if it has none for one."""
    for _, same in groupby(copies, key=lambda copy: (id(copy.kv), copy.pages_per_chunk)):
        run = list(same)
        kv, pages_per_chunk = run[0].kv, run[0].pages_per_chunk
        for planes in _planes(kv, pages_per_chunk) if by_layer else [range(len(kv.planes))]:
            each_bytes = row_bytes(kv, pages_per_chunk, planes)
            if each_bytes > staging_bytes:
                raise ValueError(f"a chunk takes {each_bytes} bytes, buffers have {staging_bytes}")
            at_once = staging_bytes // each_bytes
            for start in range(0, len(run), at_once):
                yield Batch(run[start : start + at_once], planes)


def _planes(kv: PagedKV, pages_per_chunk: int) -> Iterator[range]:
    """Whole layers, as few at once as the link likes."""
    start = stop = 0
    for index in range(kv.num_layers):
        stop = kv.layer(index).stop
        last = index == kv.num_layers - 1
        if last or part_bytes(kv, pages_per_chunk, range(start, stop)) >= LAYER_BYTES:
            yield range(start, stop)
            start = stop
