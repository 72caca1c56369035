"""Gather and scatter between pages and chunks. A leaf: imports no sibling, carries no version."""
