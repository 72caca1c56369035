"""Copies between pages and chunks, and digests. A leaf: imports no sibling, carries no version.

Without either rule, transformers would take this folder for Hugging Face's `kernels` whenever the
repository's root is the working directory.
"""

from .base import gather, scatter
from .fp8 import fp8_chunk_bytes, gather_fp8, scatter_fp8
from .paged import PagedKV
from .xxh3 import xxh3_128

__all__ = [
    "PagedKV",
    "fp8_chunk_bytes",
    "gather",
    "gather_fp8",
    "scatter",
    "scatter_fp8",
    "xxh3_128",
]
