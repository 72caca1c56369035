"""Runs every kernel on small tensors and compares every byte: what compute-sanitizer watches.

compute-sanitizer --tool memcheck python -P -m rootcellar.bench.device_memcheck
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from . import device_codes, device_exact
from .device_budget import Part
from .device_facts import device_to_measure
from .device_scale import MEMCHECK
from .device_section import Site


def main() -> int:
    """The exit status: 1 if a byte differs."""
    site = Site(
        device=device_to_measure(dry_run=False),
        directory=Path(tempfile.gettempdir()),
        seed=0,
        scale=MEMCHECK,
    )
    wrong = [
        what
        for section in (device_exact.measure, device_codes.measure)
        for what in section(site, Part(60.0, lambda fraction: None)).wrong
    ]
    for what in wrong:
        print(f"differs: {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
