"""What a trace's records say, checked as it is taken out of them."""

from __future__ import annotations

import math
from array import array
from reprlib import repr as short_repr
from typing import Any

Record = dict[str, Any]

MOST_TOKENS = 2**31 - 1
"""In one prompt: so that a broken number is an error and not a reason to run out of memory."""


def whole(record: Record, field: str, most: int = MOST_TOKENS) -> int:
    value = record.get(field)
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{field} is {short_repr(value)}, must be a whole number from 0 to {most}")
    return value


def number(record: Record, field: str) -> float:
    value: Any = record.get(field)
    right = isinstance(value, int | float) and not isinstance(value, bool)
    if right and math.isfinite(value) and value >= 0:
        return float(value)
    raise ValueError(f"{field} is {short_repr(value)}, must be a number from 0 on")


def ids(record: Record, field: str) -> array[int]:
    value = record.get(field)
    try:
        if isinstance(value, list):
            return array("Q", value)
    except (TypeError, OverflowError):
        pass
    raise ValueError(
        f"{field} is {short_repr(value)}, must be a list of whole numbers from 0 to {2**64 - 1}"
    )
