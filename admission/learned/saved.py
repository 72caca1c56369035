"""What was learned, as bytes: counts of the classes in use, and the pace of requests.

magic, version, age buckets, classes, mean gap in seconds | classes | events | exposure | the rest
"""

import struct

import numpy as np

from .hazard import refit, use_class
from .records import AGES, NUM_CLASSES, Model

_HEADER = struct.Struct("<8sIIId")
_MAGIC, _VERSION = b"RCLEARN\0", 1
_GAPS = 32
"""What the pace counts for, so that it is used at once and soon makes room for a new one."""


def pack(model: Model) -> bytes:
    now = model.now[0]
    used = model.used[: now["used"]]
    pace_s = float(now["gaps_s"] / now["gaps"]) if now["gaps"] >= _GAPS else 0.0
    header = _HEADER.pack(_MAGIC, _VERSION, AGES, len(used), pace_s)
    tables = [used.astype("<i8"), model.events[used], model.exposure[used]]
    return header + b"".join(table.tobytes() for table in tables)


def unpack(model: Model, data: bytes) -> bytes | None:
    """Go on from what pack() made; returns the bytes behind it. None, and nothing changed, when it
    cannot be used."""
    if len(data) < _HEADER.size:
        return None
    magic, version, ages, num_used, pace_s = _HEADER.unpack_from(data)
    size = _HEADER.size + num_used * 8 * (1 + 2 * AGES)
    if (magic, version, ages) != (_MAGIC, _VERSION, AGES) or len(data) < size:
        return None
    used = np.frombuffer(data, "<i8", num_used, _HEADER.size)
    tables = np.frombuffer(data, "<f8", 2 * num_used * AGES, _HEADER.size + used.nbytes)
    sound = np.isfinite(tables).all() and (tables >= 0).all() and np.isfinite(pace_s)
    if not sound or not ((used >= 0) & (used < NUM_CLASSES)).all() or pace_s < 0:
        return None
    for klass in used.tolist():
        use_class(model, klass)
    model.events[used], model.exposure[used] = tables.reshape(2, num_used, AGES)
    refit(model)
    model.now["gaps"], model.now["gaps_s"] = (_GAPS, _GAPS * pace_s) if pace_s else (0, 0)
    return data[size:]
