from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.admission.base import Key, Tier
from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.events import ChunkEvent, EventLog
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import CHUNK_BYTES, FILE_BYTES, NAMESPACE, chunks_of, keys_of

Place = tuple[Tier, Key]


def replay(events: Iterable[ChunkEvent], seen: set[Place]) -> None:
    """Change `seen` as the events say; each must change it."""
    for event in events:
        place = event.tier, event.key
        assert (place in seen) != event.stored, "told twice in a row"
        (seen.add if event.stored else seen.remove)(place)


def _store(root: Path, dram: int = 4) -> TieredStore:
    config = StoreConfig(
        dram_bytes=dram * CHUNK_BYTES,
        nvme_path=root / "store",
        nvme_bytes=8 * FILE_BYTES,
        io="threads",
    )
    return TieredStore(config, NAMESPACE)


def _changes(events: list[ChunkEvent]) -> list[tuple[str, int, bool]]:
    """Tier, index in the chain (1, 2, 3, 4), stored."""
    return [(e.tier.value, keys_of((1, 2, 3, 4)).index(e.key), e.stored) for e in events]


@given(
    max_events=st.integers(1, 40),
    steps=st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=60),
)
def test_who_falls_behind_knows_less_and_nothing_wrong(
    max_events: int, steps: list[int | None]
) -> None:
    log, held, seen = EventLog(), set[Place](), set[Place]()
    log.start(max_events)
    changes = 0
    for step in steps:
        if step is None:
            events = log.take()
            assert len(events) <= max_events + 6
            replay(events, seen)
            assert seen <= held
            assert seen == held or changes > max_events
            continue
        changes += 1
        place = (Tier.DRAM, Tier.NVME)[step % 2], bytes([step])
        if place in held:
            held.remove(place)
            log.removed(*place)
        else:
            held.add(place)
            log.stored(*place)


def test_nothing_is_recorded_unless_asked_for(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        store.put(keys_of((1, 2)), chunks_of((1, 2)))
        store.flush()
        assert store.take_events() == []


def test_a_log_without_room_is_refused(tmp_path: Path) -> None:
    with _store(tmp_path) as store, pytest.raises(ValueError, match="max_events is 0"):
        store.record_events(0)


def test_a_chunk_is_told_of_when_it_is_readable_and_again_when_it_is_on_nvme(
    tmp_path: Path,
) -> None:
    with _store(tmp_path) as store:
        store.record_events()
        job = store.prepare_store(keys_of((1, 2)))
        assert store.take_events() == []
        store.complete_store(job)
        assert _changes(store.take_events()) == [("dram", 0, True), ("dram", 1, True)]
        store.flush()
        assert sorted(_changes(store.take_events())) == [("nvme", 0, True), ("nvme", 1, True)]
        store.complete_store(store.prepare_store(keys_of((1, 2, 3))), success=False)
        assert store.take_events() == []


def test_what_was_there_when_recording_began_is_told_first(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        store.put(keys_of((1, 2)), chunks_of((1, 2)))
    with _store(tmp_path) as store:
        store.get(keys_of((1,)))
        store.record_events()
        told = [("dram", 0, True), ("nvme", 0, True), ("nvme", 1, True)]
        assert sorted(_changes(store.take_events())) == told
        store.invalidate()
        told = [(tier, index, False) for tier, index, _ in told]
        assert sorted(_changes(store.take_events())) == told


def test_a_read_is_told_of_when_it_is_promoted_and_not_before(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        store.put(keys_of((1,)), chunks_of((1,)))
    with _store(tmp_path) as store:
        store.record_events()
        store.take_events()
        load = store.prepare_load(keys_of((1,)))
        store.wait_load(load)
        assert store.take_events() == []
        store.complete_load(load)
        assert _changes(store.take_events()) == [("dram", 0, True)]


def test_an_evicted_chunk_is_told_of(tmp_path: Path) -> None:
    with _store(tmp_path, dram=2) as store:
        store.put(keys_of((1, 2)), chunks_of((1, 2)))
        store.flush()
        store.record_events()
        store.take_events()
        store.put(keys_of((1, 2, 3)), chunks_of((1, 2, 3)))
        assert _changes(store.take_events())[:2] == [("dram", 1, False), ("dram", 2, True)]
