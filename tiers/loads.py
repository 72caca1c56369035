"""Loads that wait for reads: several may wait for one, and none waits past its deadline."""

from .base import Load, LoadState


class LoadBook:
    def __init__(self) -> None:
        self._waiting: dict[int, list[tuple[Load, int]]] = {}  # by slot: loads and chunk indices
        self._open: dict[int, Load] = {}

    def open(self, load: Load) -> None:
        """Start to follow a load whose `missing` is complete; READY at once when that is empty."""
        self._open[id(load)] = load
        for index in load.missing:
            slot = load.chunks[index - load.start].slot
            self._waiting.setdefault(slot, []).append((load, index))
        _ready_if_complete(load)

    def arrived(self, slot: int) -> list[Load]:
        """Returns the loads that are READY now, since the last of their reads came."""
        waiting = [load for load, _ in self._waiting.get(slot, []) if load.missing]
        for load, index in self._waiting.pop(slot, []):
            load.missing.discard(index)
            _ready_if_complete(load)
        return [load for load in waiting if load.state is LoadState.READY]

    def failed(self, slot: int, why: str) -> None:
        for load, index in self._waiting.pop(slot, []):
            if index in load.missing:
                _cut(load, index, why)

    def expire(self, now_s: float) -> list[Load]:
        """Cut the loads whose deadline is past; returns those."""
        late = [
            load
            for load in self._open.values()
            if load.state is LoadState.PENDING and now_s > load.deadline_s
        ]
        for load in late:
            _cut(load, min(load.missing), "not read in time")
        return late

    def cut_all(self, why: str) -> None:
        for load in self._open.values():
            _cut(load, load.start, why)

    def close(self, load: Load) -> None:
        load.state = LoadState.DONE
        load.missing.clear()
        del self._open[id(load)]

    def __len__(self) -> int:
        return len(self._open)


def _cut(load: Load, stop: int, why: str) -> None:
    """End the run before chunk `stop`; a shorter run stays as it is."""
    if stop >= load.stop:
        return
    load.stop = stop
    load.why_not = why
    load.missing = {index for index in load.missing if index < stop}
    _ready_if_complete(load)


def _ready_if_complete(load: Load) -> None:
    if not load.missing and load.state is LoadState.PENDING:
        load.state = LoadState.READY
