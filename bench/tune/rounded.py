"""Numbers as people say them: two or three digits that matter, and the unit."""

_GIB = float(1 << 30)
_SIZES = ((2.0**50, "PiB"), (2.0**40, "TiB"), (_GIB, "GiB"), (2.0**20, "MiB"), (1024.0, "KiB"))
_COUNTS = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"))


def size(num_bytes: float) -> str:
    """In binary units: 64 GiB, 2.4 TiB."""
    for unit_bytes, unit in _SIZES:
        if num_bytes >= 0.9995 * unit_bytes:
            return f"{_short(num_bytes / unit_bytes)} {unit}"
    return f"{num_bytes:.0f} bytes"


def share(fraction: float) -> str:
    """Of a whole: 34 %, but 5.3 % and 96.4 %, where a point is much of what is there or left."""
    percent = 100 * fraction
    if 0 < percent < 0.05:
        return "under 0.1 %"
    if 10 <= percent < 90 or percent in (0, 100):
        return f"{percent:.0f} %"
    return f"{_tenths(percent)} %"


def points(fraction: float) -> str:
    """The difference of two shares: 4.1 points."""
    value = _tenths(100 * fraction)
    return "1 point" if value == "1" else f"{value} points"


def seconds(value: float) -> str:
    """From microseconds to hours: 340 ms, 1.9 s, 3 min."""
    if value >= 7200:
        return f"{_short(value / 3600)} h"
    if value >= 120:
        return f"{_short(value / 60)} min"
    if value >= 0.9995:
        return f"{_short(value)} s"
    if value >= 0.9995e-3:
        return f"{_short(1000 * value)} ms"
    return "0 s" if value <= 0 else f"{_short(1e6 * value)} µs"


def count(value: float) -> str:
    """4.7 M, 183 k, 512."""
    for unit, letter in _COUNTS:
        if value >= 0.9995 * unit:
            return f"{_short(value / unit)}{letter}"
    return _short(value)


def number(value: float) -> str:
    """Without a unit: 0.012, 1.6, 39, 12,400."""
    return f"{value:.2g}" if 0 < value < 0.995 else _short(value)


def _short(value: float) -> str:
    """One digit behind the point below ten, none above."""
    return _tenths(value) if value < 9.95 else f"{value:,.0f}"


def _tenths(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
