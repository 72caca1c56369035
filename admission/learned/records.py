"""The arrays that the compiled parts share: one record per chunk, one per chunk and tier, one per
sample of the learning log, and the tables per class.

A chunk is a row number here; the policy gives rows to keys. NONE stands for no row.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

NONE = -1

AGES = 40
"""Age buckets: 2.5 per octave, from one request to about 60,000."""
GAPS, EXTENSIONS, TURNS, TOUCHES = 6, 8, 4, 5
NUM_CLASSES = 2 * TOUCHES * TURNS * EXTENSIONS * GAPS
LOG_ENTRIES = 1 << 17
HEAP_ENTRIES = 4096

CHUNK = np.dtype(
    [
        ("last", "f8"),  # clock at its last use
        ("entry", "i8"),  # its entry in the log, counted from the first ever, or NONE
        ("parent", "i4"),
        ("older", "i4"),  # among the ghosts
        ("newer", "i4"),
        ("klass", "i2"),
        ("touches", "u1"),
        ("turn", "u1"),
        ("tracked", "u1"),  # it was requested, and is not forgotten
        ("places", "u1"),  # tiers it is in
        ("ghost", "u1"),  # tracked, in no tier
        ("follows", "u1"),  # never requested by itself: it is worth what its parent is
    ],
    align=True,
)
PLACE = np.dtype(
    [
        ("parent", "i4"),  # in the tier's forest, NONE for a head
        ("kids", "i4"),  # children in the same tier
        ("leaf", "i4"),  # its index among the leaves, or NONE
        ("here", "u1"),
        ("drawn", "u1"),  # this draw of leaves has it
    ],
    align=True,
)
SAMPLE = np.dtype(
    [("time", "f8"), ("weight", "f4"), ("klass", "i2"), ("alive", "u1")],
    align=True,
)
NOW = np.dtype(
    [
        ("clock", "f8"),
        ("requests", "i8"),
        ("gaps", "f8"),  # decayed count of gaps between requests, and their sum in seconds
        ("gaps_s", "f8"),
        ("time_s", "f8"),
        ("logged", "i8"),
        ("used", "i8"),  # classes in use
        ("ghosts", "i8"),
        ("most_ghosts", "i8"),
        ("oldest", "i4"),  # ghost
        ("newest", "i4"),
        ("forgotten", "i8"),
        ("random", "u8"),
    ],
    align=True,
)
SIZES = np.dtype(
    [
        ("capacity", "i8"),
        ("here", "i8"),
        ("leaves", "i8"),
        ("heap", "i8"),
        ("drawn_at", "f8"),
        ("writes", "f8"),  # chunks that came in per tick, decayed
        ("wrote_at", "f8"),
        ("filled", "u1"),  # it was full once
    ],
    align=True,
)
Rows = npt.NDArray[np.int32]
Records: TypeAlias = Any
"""An array of one of the types above; compiled code reads its fields as attributes."""
Table = npt.NDArray[np.float64]


class Model(NamedTuple):
    """What was learned, and what is known of every chunk."""

    now: Records
    chunks: Records
    forgotten: Rows
    """Rows that were given up, for whoever hands them out."""
    log: Records
    walked: npt.NDArray[np.int64]
    """Per age: how far in the log every sample has reached it."""
    events: Table
    exposure: Table
    hazard: Table
    """Chance to be used within an age bucket, of a chunk that gets there unused; per class."""
    worth: Table
    """Gittins index of a chunk that gets to an age bucket unused; per class."""
    used: npt.NDArray[np.int64]
    known: npt.NDArray[np.uint8]
    base: Table
    """Hazard by gap and age, before the factors of the other features."""
    factors: Table


class Place(NamedTuple):
    """One tier: who is there, which of them are leaves, and a draw of those by index."""

    sizes: Records
    chunks: Records
    leaves: Rows
    heap: Rows
    keys: Table
    """Of the heap: (index, last use)."""


def new_model(num_chunks: int, most_ghosts: int) -> Model:
    now = np.zeros(1, NOW)
    now["most_ghosts"], now["random"] = most_ghosts, 88172645463325252
    now["oldest"] = now["newest"] = NONE
    chunks = np.zeros(num_chunks, CHUNK)
    _clear_chunks(chunks)
    classes = (NUM_CLASSES, AGES)
    return Model(
        now=now,
        chunks=chunks,
        forgotten=np.zeros(num_chunks, np.int32),
        log=np.zeros(LOG_ENTRIES, SAMPLE),
        walked=np.zeros(AGES, np.int64),
        events=np.zeros(classes),
        exposure=np.zeros(classes),
        hazard=np.zeros(classes),
        worth=np.zeros(classes),
        used=np.zeros(NUM_CLASSES, np.int64),
        known=np.zeros(NUM_CLASSES, np.uint8),
        base=np.full((GAPS, AGES), 0.05),
        factors=np.ones((3, 2 * TOUCHES)),
    )


def new_place(num_chunks: int, capacity: int) -> Place:
    sizes = np.zeros(1, SIZES)
    sizes["capacity"], sizes["drawn_at"] = capacity, -1
    chunks = np.zeros(num_chunks, PLACE)
    chunks["leaf"] = NONE
    return Place(
        sizes,
        chunks,
        np.zeros(num_chunks, np.int32),
        np.zeros(HEAP_ENTRIES, np.int32),
        np.zeros((HEAP_ENTRIES, 2)),
    )


def grow_model(model: Model, num_chunks: int) -> Model:
    """The same model with room for more rows."""
    chunks = np.zeros(num_chunks, CHUNK)
    _clear_chunks(chunks)
    chunks[: len(model.chunks)] = model.chunks
    forgotten = np.zeros(num_chunks, np.int32)
    forgotten[: len(model.forgotten)] = model.forgotten
    return model._replace(chunks=chunks, forgotten=forgotten)


def grow_place(place: Place, num_chunks: int) -> Place:
    grown = new_place(num_chunks, 0)
    grown.chunks[: len(place.chunks)] = place.chunks
    grown.leaves[: len(place.leaves)] = place.leaves
    return place._replace(chunks=grown.chunks, leaves=grown.leaves)


def _clear_chunks(chunks: Records) -> None:
    for field in ("entry", "parent", "older", "newer"):
        chunks[field] = NONE
