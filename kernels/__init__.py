"""Gather and scatter between pages and chunks. A leaf: imports no sibling, carries no version.

Without either rule, transformers would take this folder for Hugging Face's `kernels` whenever the
repository's root is the working directory.
"""

from .base import gather, scatter

__all__ = ["gather", "scatter"]
