"""When chunks are used again: hazard by class and age, and what a place is worth that keeps one.

A class's hazard is its own events over its exposure, shrunk towards a proportional-hazards model
(Cox, JRSS B 1972) whose features multiply a base by last gap. What a chunk is worth is its Gittins
index (Gittins, JRSS B 1979): the best ratio, over all times to give it up, of the chance that it is
used until then to the time its place is taken. That is the hit density of LHD (Beckmann, Chen and
Cidon, NSDI 2018) with the best horizon in place of an assumed one, so nothing is tuned to a trace.
"""

import math

import numpy as np
import numpy.typing as npt

from ..jit import jit
from .records import AGES, EXTENSIONS, GAPS, TOUCHES, TURNS, Model, Table

SHRINK = 100.0
"""Exposure at which a class counts as much as the model of its features."""
UNSEEN = 0.02
"""Hazard, at most, of an age that nothing is known of: more keeps in a large tier what is too old,
less fills a small one with what is new."""
FORGET = 0.97
REFIT_EVERY = 128
"""Requests; with FORGET, counts halve in about 2,900."""

EDGES: npt.NDArray[np.float64] = np.unique(np.floor(2.0 ** (np.arange(60) / 2.5)))[: AGES + 1]
WIDTHS: npt.NDArray[np.float64] = np.diff(EDGES)
_YOUNG = 1024
_YOUNG_BUCKETS = np.clip(np.searchsorted(EDGES, np.arange(_YOUNG), "right") - 1, 0, AGES - 1)


@jit
def age_bucket(age: float) -> int:
    """The bucket of an age on the clock; the last one has no upper edge."""
    if age < _YOUNG:
        return int(_YOUNG_BUCKETS[int(age)])
    bucket = AGES - 1
    while EDGES[bucket] > age:
        bucket -= 1
    return bucket


@jit
def class_of(tail: bool, touches: int, turn: int, extension: int, gap: float) -> int:
    """What of a use tells most about the next one.

    tail: it was the last chunk of its request. touches: uses so far. turn: 0 for a chunk of a first
    prompt, one more with each extension. extension: chunks that its last request added to what was
    known. gap: clock since the use before, 0 if there was none.
    """
    rank = touches - 1 if touches <= 2 else (2 if touches <= 4 else (3 if touches <= 8 else 4))
    if tail:
        rank += TOUCHES
    size = 0
    rest = extension + 1
    while rest > 1 and size < EXTENSIONS - 1:
        rest >>= 1
        size += 1
    wait = 0
    if gap > 0:
        wait = 1 + (gap >= 4) + (gap >= 16) + (gap >= 64) + (gap >= 256)
    return ((rank * TURNS + min(turn, TURNS - 1)) * EXTENSIONS + size) * GAPS + wait


@jit
def reuse_chance(model: Model, klass: int, age: float, horizon: int) -> float:
    """That a chunk unused for `age` is used before it leaves age bucket `horizon`."""
    unused = 1.0
    for bucket in range(age_bucket(age), horizon + 1):
        unused *= 1 - model.hazard[klass, bucket]
    return 1 - unused


@jit
def use_class(model: Model, klass: int) -> None:
    """A class gets its first chunk: until the next refit, its features speak for it."""
    if not model.known[klass]:
        model.known[klass] = 1
        model.used[model.now[0].used] = klass
        model.now[0].used += 1
        _fit_class(model, klass)


@jit
def forget_a_little(model: Model) -> None:
    for klass in model.used[: model.now[0].used]:
        for age in range(AGES):
            model.events[klass, age] *= FORGET
            model.exposure[klass, age] *= FORGET


@jit
def refit(model: Model) -> None:
    """Fit base and factors in turns, then every class in use."""
    used = model.used[: model.now[0].used]
    model.factors[:] = 1.0
    for _ in range(2):
        _fit_base(model, used)
        for feature in range(3):
            _fit_factor(model, used, feature)
    _fit_base(model, used)
    for klass in used:
        _fit_class(model, klass)


@jit
def _feature(klass: int, feature: int) -> int:
    """The value of feature 0 (tail and touches), 1 (turn), 2 (extension) or 3 (gap)."""
    if feature == 3:
        return klass % GAPS
    if feature == 2:
        return klass // GAPS % EXTENSIONS
    if feature == 1:
        return klass // (GAPS * EXTENSIONS) % TURNS
    return klass // (GAPS * EXTENSIONS * TURNS)


@jit
def _factor(model: Model, klass: int) -> float:
    product = 1.0
    for feature in range(3):
        product *= model.factors[feature, _feature(klass, feature)]
    return product


@jit
def _fit_base(model: Model, used: npt.NDArray[np.int64]) -> None:
    """By gap and age. A gap that little is known of has the common hazard, times its own level."""
    events, exposure = np.zeros((GAPS, AGES)), np.zeros((GAPS, AGES))
    happened, ticks = 0.0, 0.0
    for klass in used:
        gap, factor = _feature(klass, 3), _factor(model, klass)
        for age in range(AGES):
            happened += model.events[klass, age]
            ticks += model.exposure[klass, age] * WIDTHS[age]
            events[gap, age] += model.events[klass, age]
            exposure[gap, age] += model.exposure[klass, age] * factor
    common = _common_hazard(events, exposure, (happened + 1) / (ticks + 1000))
    for gap in range(GAPS):
        level = (events[gap].sum() + 10) / ((exposure[gap] * common).sum() + 10)
        for age in range(AGES):
            alike = 1 - (1 - common[age]) ** level
            rate = (events[gap, age] + 50 * alike) / (exposure[gap, age] + 50)
            model.base[gap, age] = min(0.999, rate)


@jit
def _common_hazard(events: Table, exposure: Table, per_tick: float) -> Table:
    """By age: the geometric mean over the gaps. In a plain one the heads that every request names
    would outweigh all else, and whatever is new would seem to come back at once.

    Before anything is known of an age its hazard is that of the age before, or what the mean over
    all ages makes of its width: were it the same for all, the short, young ages would seem best.
    """
    common = np.zeros(AGES)
    before = 0.0
    for age in range(AGES):
        unseen = max(before, min(UNSEEN, per_tick * WIDTHS[age]))
        logs = 0.0
        for gap in range(GAPS):
            logs += math.log((events[gap, age] + 100 * unseen) / (exposure[gap, age] + 100))
        before = common[age] = math.exp(logs / GAPS)
    return common


@jit
def _fit_factor(model: Model, used: npt.NDArray[np.int64], feature: int) -> None:
    """By how much each value of a feature has more events than the rest of the model expects."""
    happened, expected = np.zeros(2 * TOUCHES), np.zeros(2 * TOUCHES)
    for klass in used:
        value, gap = _feature(klass, feature), _feature(klass, 3)
        others = _factor(model, klass) / model.factors[feature, value]
        for age in range(AGES):
            happened[value] += model.events[klass, age]
            expected[value] += model.exposure[klass, age] * model.base[gap, age] * others
    for value in range(2 * TOUCHES):
        ratio = (happened[value] + 10) / (expected[value] + 10)
        model.factors[feature, value] = min(20.0, max(0.01, ratio))


@jit
def _fit_class(model: Model, klass: int) -> None:
    gap, factor = _feature(klass, 3), _factor(model, klass)
    for age in range(AGES):
        alike = 1 - (1 - model.base[gap, age]) ** factor
        events, exposure = model.events[klass, age], model.exposure[klass, age]
        model.hazard[klass, age] = (events + SHRINK * alike) / (exposure + SHRINK)
    _fit_index(model, klass)


@jit
def _fit_index(model: Model, klass: int) -> None:
    for start in range(AGES):
        unused, taken, best = 1.0, 0.0, 0.0
        for age in range(start, AGES):
            chance = model.hazard[klass, age]
            taken += unused * WIDTHS[age] * (1 - chance / 2)
            unused *= 1 - chance
            best = max(best, (1 - unused) / taken)
        model.worth[klass, start] = best
