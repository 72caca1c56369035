"""Who is in a tier, and which of its leaves is worth least.

Only leaves go. The lowest is sought in a random draw, kept in a heap while the clock stands; a
parent joins it when its last child has gone, so that a cold chain is trimmed on and on.
"""

from ..jit import jit
from .hazard import age_bucket
from .history import became_ghost, no_ghost
from .records import HEAP_ENTRIES, NONE, Model, Place, Rows

DRAW = 256
WRITES_OVER = 512.0
"""Ticks that the rate of arrivals is taken over."""


@jit
def enter(model: Model, place: Place, row: int, parent: int) -> None:
    """A chunk came into the tier, where it hangs from `parent`, which need not be there."""
    sizes, seat, chunk = place.sizes[0], place.chunks[row], model.chunks[row]
    seat.here = 1
    sizes.here += 1
    sizes.filled |= sizes.here >= sizes.capacity
    if seat.kids == 0:
        _add_leaf(place, row)
    seat.parent = parent
    if parent != NONE:
        place.chunks[parent].kids += 1
        _drop_leaf(place, parent)
    chunk.places += 1
    if chunk.ghost:
        no_ghost(model, row)
    _count_writes(model, place, 1.0)


@jit
def enter_all(model: Model, place: Place, rows: Rows, parents: Rows) -> None:
    for at in range(len(rows)):
        enter(model, place, rows[at], parents[at])


@jit
def leave(model: Model, place: Place, row: int) -> None:
    """A chunk left the tier. Its parent may be a leaf now, and the next to go."""
    sizes, seat, chunk = place.sizes[0], place.chunks[row], model.chunks[row]
    seat.here = 0
    sizes.here -= 1
    _drop_leaf(place, row)
    parent = seat.parent
    if parent != NONE:
        place.chunks[parent].kids -= 1
        if place.chunks[parent].kids == 0 and place.chunks[parent].here:
            _add_leaf(place, parent)
            if sizes.drawn_at == model.now[0].clock:
                _push_heap(model, place, parent)
    chunk.places -= 1
    if chunk.places == 0 and chunk.tracked:
        became_ghost(model, row)


@jit
def index_of(model: Model, row: int) -> float:
    """What a place is worth that keeps the chunk: chance of use per tick."""
    while model.chunks[row].follows and model.chunks[row].parent != NONE:
        row = model.chunks[row].parent
    chunk = model.chunks[row]
    return float(model.worth[chunk.klass, age_bucket(model.now[0].clock - chunk.last)])


@jit
def lowest(model: Model, place: Place) -> int:
    """The leaf of least index in the draw of this moment, NONE when it is used up. It stays in."""
    sizes = place.sizes[0]
    if sizes.drawn_at != model.now[0].clock:
        draw(model, place)
    while sizes.heap > 0:
        row = place.heap[0]
        if place.chunks[row].leaf != NONE:
            return int(row)
        pop_lowest(place)
    return NONE


@jit
def draw(model: Model, place: Place) -> None:
    """Another draw: all leaves if they are few."""
    sizes = place.sizes[0]
    sizes.heap, sizes.drawn_at = 0, model.now[0].clock
    if sizes.leaves <= DRAW:
        for leaf in range(sizes.leaves):
            _push_heap(model, place, place.leaves[leaf])
        return
    for _ in range(DRAW):
        row = int(place.leaves[_random(model) % sizes.leaves])
        if not place.chunks[row].drawn:
            place.chunks[row].drawn = 1
            _push_heap(model, place, row)
    for entry in range(sizes.heap):
        place.chunks[place.heap[entry]].drawn = 0


@jit
def lowest_index(place: Place) -> float:
    """Of the chunk that lowest() named."""
    return float(place.keys[0, 0])


@jit
def pop_lowest(place: Place) -> None:
    """Take what lowest() named out of this draw."""
    sizes = place.sizes[0]
    sizes.heap -= 1
    last = sizes.heap
    hole = 0
    while True:
        child = 2 * hole + 1
        if child >= last:
            break
        if child + 1 < last and _before(place, child + 1, child):
            child += 1
        if not _before(place, child, last):
            break
        _move(place, child, hole)
        hole = child
    _move(place, last, hole)


@jit
def life(model: Model, place: Place) -> float:
    """Ticks that a chunk stays in a full tier, by Little's law; 0 while it was never full.

    It grows when nothing comes in any more, so a tier cannot shut itself off.
    """
    sizes = place.sizes[0]
    if not sizes.filled:
        return 0.0
    _count_writes(model, place, 0.0)
    return float(sizes.capacity / max(sizes.writes, 1e-9))


@jit
def _count_writes(model: Model, place: Place, num_chunks: float) -> None:
    sizes, clock = place.sizes[0], model.now[0].clock
    if clock > sizes.wrote_at:
        sizes.writes *= (1 - 1 / WRITES_OVER) ** (clock - sizes.wrote_at)
        sizes.wrote_at = clock
    sizes.writes += num_chunks / WRITES_OVER


@jit
def _random(model: Model) -> int:
    """Xorshift (Marsaglia, JSS 2003), so that a replay draws what a store drew."""
    state = model.now[0].random
    state ^= state << 13
    state ^= state >> 7
    state ^= state << 17
    model.now[0].random = state
    return int(state >> 33)


@jit
def _push_heap(model: Model, place: Place, row: int) -> None:
    sizes = place.sizes[0]
    if sizes.heap == HEAP_ENTRIES - 1:
        return
    index, last = index_of(model, row), model.chunks[row].last
    heap, keys = place.heap, place.keys
    hole = sizes.heap
    sizes.heap += 1
    while hole > 0:
        above = (hole - 1) // 2
        if keys[above, 0] < index or (keys[above, 0] == index and keys[above, 1] <= last):
            break
        heap[hole], keys[hole, 0], keys[hole, 1] = heap[above], keys[above, 0], keys[above, 1]
        hole = above
    heap[hole], keys[hole, 0], keys[hole, 1] = row, index, last


@jit
def _before(place: Place, one: int, other: int) -> bool:
    """Whether heap entry `one` goes before `other`: it is worth less, or as much and is older."""
    if place.keys[one, 0] != place.keys[other, 0]:
        return bool(place.keys[one, 0] < place.keys[other, 0])
    return bool(place.keys[one, 1] < place.keys[other, 1])


@jit
def _move(place: Place, entry: int, hole: int) -> None:
    place.heap[hole] = place.heap[entry]
    place.keys[hole, 0], place.keys[hole, 1] = place.keys[entry, 0], place.keys[entry, 1]


@jit
def _add_leaf(place: Place, row: int) -> None:
    sizes, seat = place.sizes[0], place.chunks[row]
    seat.leaf = sizes.leaves
    place.leaves[sizes.leaves] = row
    sizes.leaves += 1


@jit
def _drop_leaf(place: Place, row: int) -> None:
    sizes, seat = place.sizes[0], place.chunks[row]
    if seat.leaf == NONE:
        return
    sizes.leaves -= 1
    last = place.leaves[sizes.leaves]
    place.leaves[seat.leaf] = last
    place.chunks[last].leaf = seat.leaf
    seat.leaf = NONE
