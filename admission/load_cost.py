"""Load a run of chunks, or compute it again: what each was measured to take decides, per request.

Cake (Jin and others, ICML 2025, "Compute or load KV cache? Why not both?") computes from the head
and loads from the tail until both meet. The engines behind this store prefill what follows a
loaded prefix, so what is left to choose is where the load stops. Ours are that choice and the
estimator: a line through measured times that one stall cannot bend for long.
"""

from collections.abc import Sequence
from itertools import compress, islice
from operator import is_not

from .base import Tier

MIN_MEASURED = 8
"""Measurements before an estimate counts; until then the answer is to load."""

TRY_EVERY = 16
"""One in so many decisions that would cut a run loads all of it, to measure again."""

_KEEP = 15 / 16
_KEEP_AFTER_FAST = 1 / 4
_CUT_ABOVE = 4.0
_FAR_BELOW = 8.0
_TICK_S = 1e-9
"""The least a measurement counts as: from nothing, no multiple would ever lead up again."""


class LoadCost:
    """Learns the time of loads per tier and of prefill; keeps no clock and no history.

    For one caller's thread. Measured times include whatever the parts wait for in service, so a
    busy medium counts as a slow one.
    """

    def __init__(self) -> None:
        self._loads = {tier: _Line() for tier in Tier}
        self._prefill = _Line()
        self._cuts = 0

    def observe_load(self, tier: Tier, num_bytes: int, seconds: float) -> None:
        """num_bytes of chunks found in `tier` took `seconds` from being asked for until usable."""
        _check("num_bytes", num_bytes, seconds)
        self._loads[tier].observe(num_bytes, seconds)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine computed num_tokens of one request in `seconds`."""
        _check("num_tokens", num_tokens, seconds)
        self._prefill.observe(num_tokens, seconds)

    def load_s(self, tier: Tier, num_bytes: int) -> float | None:
        """Seconds a load of num_bytes from `tier` is expected to take; None while not known."""
        return self._loads[tier].at(num_bytes)

    def prefill_s(self, num_tokens: int) -> float | None:
        """Seconds that num_tokens more add to a prefill; None while not known."""
        line = self._prefill
        return line.slope * num_tokens if line.known else None

    def worth(self, tiers: Sequence[Tier], chunk_bytes: int, chunk_tokens: int) -> int:
        """How many leading chunks of a run to load; the engine computes the rest.

        tiers: where each chunk of the run is. Minimizes the load, each tier's latency once, plus
        the prefill of what is not loaded; of equal stops the longest. What is not known yet costs
        nothing to load. All of the run if this decision is one to measure by (TRY_EVERY).
        """
        compute_s = self.prefill_s(chunk_tokens)
        if compute_s is None or not tiers:
            return len(tiers)
        stop = self._cheapest_stop(tiers, chunk_bytes, compute_s)
        if stop == len(tiers):
            return stop
        self._cuts += 1
        return len(tiers) if self._cuts % TRY_EVERY == 0 else stop

    def _cheapest_stop(self, tiers: Sequence[Tier], chunk_bytes: int, compute_s: float) -> int:
        """Within chunks of one tier the cost is linear, so only the ends of such are compared."""
        cost = best_cost = 0.0
        best_stop = start = 0
        paid: list[_Line] = []
        for stop in _ends(tiers):
            line = self._loads[tiers[start]]
            chunk_s = -compute_s
            if line.known:
                chunk_s += line.slope * chunk_bytes
                if line not in paid:
                    paid.append(line)
                    cost += line.latency
            cost += (stop - start) * chunk_s
            if cost <= best_cost:
                best_cost, best_stop = cost, stop
            start = stop
        return best_stop


class _Line:
    """seconds = latency + slope * size, by least squares of relative errors; old ones fade.

    Dividing by size (seconds/size = slope + latency/size) makes an error of 10 % weigh the same in
    a small load as in a large one. A time far above the line is cut to _CUT_ABOVE times it: it may
    have waited for something else. One far below lets the line forget what came before: the medium
    is that fast.
    """

    __slots__ = ("_count", "_sums", "latency", "slope")

    def __init__(self) -> None:
        self._count = 0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of weight, v, v*v, u, u*v: v = 1/size, u = s/size
        self.latency = 0.0
        self.slope = 0.0

    @property
    def known(self) -> bool:
        return self._count >= MIN_MEASURED

    def at(self, size: float) -> float | None:
        return self.latency + self.slope * size if self.known else None

    def observe(self, size: float, seconds: float) -> None:
        keep, seconds = _KEEP, max(seconds, _TICK_S)
        if self._count:
            expected = self.latency + self.slope * size
            if seconds * _FAR_BELOW < expected:
                keep = _KEEP_AFTER_FAST
            seconds = min(seconds, expected * _CUT_ABOVE)
        self._count = min(self._count + 1, MIN_MEASURED)
        v, u = 1.0 / size, seconds / size
        w0, v0, vv0, u0, uv0 = self._sums
        self._sums = (
            keep * w0 + 1.0,
            keep * v0 + v,
            keep * vv0 + v * v,
            keep * u0 + u,
            keep * uv0 + u * v,
        )
        self._fit()

    def _fit(self) -> None:
        w, v, vv, u, uv = self._sums
        spread = w * vv - v * v
        # Sizes too much alike tell no latency from speed: all of the time is then put on the bytes.
        latency = (w * uv - u * v) / spread if spread > 1e-3 * w * vv else 0.0
        latency = max(0.0, latency)
        slope = (u - latency * v) / w
        if slope < 0.0:
            latency, slope = uv / vv, 0.0
        self.latency, self.slope = latency, slope


def _ends(tiers: Sequence[Tier]) -> list[int]:
    """Where each stretch of chunks of one tier ends; one pass, without a step of Python a chunk."""
    changes = map(is_not, tiers, islice(tiers, 1, None))
    return [*compress(range(1, len(tiers)), changes), len(tiers)]


def _check(name: str, size: int, seconds: float) -> None:
    if size < 1:
        raise ValueError(f"{name} is {size}, must be at least 1")
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(f"seconds is {seconds}, must be finite and at least 0")
