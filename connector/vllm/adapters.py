"""LoRA adapters by what they are now.

vLLM's block hashes hold an adapter's name and path. An adapter that was trained on in place keeps
both, and KV on NVMe outlives it, so its files count too, as the file system describes them.
"""

import hashlib
import os
from pathlib import Path
from typing import Any


class Adapters:
    """A salt for the keys of each adapter's requests; looks at its files once per load of it."""

    def __init__(self) -> None:
        self._salts: dict[tuple[int, str], bytes] = {}
        self._unknown = os.urandom(32)

    def salt(self, lora_request: Any) -> bytes:
        """Of a vLLM LoRARequest. One whose files are not to be seen here has another salt in every
        process, so that its KV does not outlive this one."""
        adapter = (lora_request.lora_int_id, lora_request.lora_path)
        salt = self._salts.get(adapter)
        if salt is None or lora_request.load_inplace:
            salt = self._salts[adapter] = _of_files(Path(lora_request.lora_path)) or self._unknown
        return salt


def _of_files(folder: Path) -> bytes | None:
    """SHA-256 over name, size and time of change of every file; None if there are none."""
    try:
        found = sorted((entry.name, entry.stat()) for entry in os.scandir(folder))
    except OSError:
        return None
    lines = [f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n" for name, stat in found]
    return (
        hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).digest()
        if lines
        else None
    )
