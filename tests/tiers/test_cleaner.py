"""Late write-down, through the store: what is decided when, and what becomes of what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from rootcellar.admission.always import Always
from rootcellar.admission.base import (
    AdmissionPolicy,
    Answer,
    Boundary,
    Decision,
    EvictionOrder,
    Offer,
    Tier,
)
from rootcellar.tiers.base import WriteDown
from rootcellar.tiers.cleaner import AT_ONCE, CLEAN_SHARE
from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.dram import ChunkState
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import CHUNK_BYTES, FILE_BYTES, NAMESPACE, chunks_of, keys_of
from rootcellar.tiers.toy import Path as Chain
from rootcellar.tiers.toy_policy import ValuedOrder


class Scripted(Always):
    """Admits everything, save what `onto_nvme` says, and remembers what it was offered."""

    def __init__(self) -> None:
        self.refuses: set[bytes] = set()
        self.worth: dict[bytes, float] = {}
        self.offers: list[Offer] = []

    def decide(self, offer: Offer) -> Decision:
        self.offers.append(offer)
        if offer.boundary is Boundary.ONTO_NVME and self.refuses.intersection(offer.chain):
            return Decision(Answer.REJECT, 0, "not worth a write")
        worth = [self.worth.get(key, 5.0) for key in offer.chain[offer.start :]]
        return Decision(Answer.ADMIT, len(offer.chain), worth=worth if self.worth else ())

    @property
    def paths(self) -> list[list[bytes]]:
        """What was offered to NVMe."""
        return [list(o.chain) for o in self.offers if o.boundary is Boundary.ONTO_NVME]


def _open(
    root: Path,
    policy: AdmissionPolicy,
    *,
    dram: int = 8,
    nvme: int = 32,
    write_down: WriteDown = "late",
) -> TieredStore:
    config = StoreConfig(
        dram_bytes=dram * CHUNK_BYTES,
        nvme_path=root / "store",
        nvme_bytes=nvme * FILE_BYTES,
        io="threads",
        admission=lambda: policy,
        write_down=write_down,
    )
    return TieredStore(config, NAMESPACE)


def _put(store: TieredStore, chain: Chain) -> int:
    return store.put(keys_of(chain), chunks_of(chain))


def _settle(store: TieredStore) -> None:
    """Until a pass of the cleaner and its writes are over; nothing is flushed."""
    while store.busy:
        store._cold.nvme.wait(0.01)
        store.poll()
    store.check_integrity()


def _states(store: TieredStore) -> dict[bytes, ChunkState]:
    return {chunk.key: chunk.state for chunk in store._cold.dram}


def test_nothing_is_written_while_enough_of_dram_is_free(tmp_path: Path) -> None:
    policy = Scripted()
    with _open(tmp_path, policy) as store:
        _put(store, (1, 2, 3))
        _settle(store)
        assert policy.paths == []
        assert store.stats()["nvme"]["chunks"] == 0
        assert store.stats()["dram"]["slots_undecided"] == 3
    assert policy.paths == [keys_of((1, 2, 3))]  # at close, the whole path of the last one at once


def test_eagerly_everything_is_written_at_once(tmp_path: Path) -> None:
    with _open(tmp_path, Scripted(), write_down="eager") as store:
        _put(store, (1, 2, 3))
        _settle(store)
        assert store.stats()["nvme"]["chunks"] == 3


def test_a_share_of_dram_is_kept_ready_ahead_of_eviction(tmp_path: Path) -> None:
    with _open(tmp_path, Scripted(), dram=2 * CLEAN_SHARE, nvme=64) as store:
        for head in range(2 * CLEAN_SHARE + 8):
            assert _put(store, (head,)) == 1
            _settle(store)
            assert store._cold.dram.ready_slots >= 2
            # What was used last is not decided before its time.
            assert _states(store)[keys_of((head,))[0]] is ChunkState.UNDECIDED
        assert store.stats()["nvme"]["chunks"] < 2 * CLEAN_SHARE


def test_what_is_only_in_dram_above_a_candidate_goes_down_with_it(tmp_path: Path) -> None:
    policy = Scripted()
    with _open(tmp_path, policy, dram=4) as store:
        _put(store, (1, 2))
        _settle(store)
        _put(store, (1, 2, 3, 4))
        _settle(store)
        assert policy.paths == [keys_of((1, 2, 3, 4))]
        assert store.stats()["nvme"]["chunks"] == 4
        offer = policy.offers[-1]
        assert (offer.start, offer.free_chunks) == (0, 32)
        assert offer.write_bytes == 4 * FILE_BYTES


def test_what_nvme_refused_is_evicted_first_and_forgotten(tmp_path: Path) -> None:
    policy = Scripted()
    policy.refuses.update(keys_of((1,)))
    with _open(tmp_path, policy, dram=2) as store:
        _put(store, (1,))
        _put(store, (2,))
        _settle(store)
        assert _states(store)[keys_of((1,))[0]] is ChunkState.UNBACKED
        assert store.stats()["refusals"] == {"onto_nvme: not worth a write": 1}
        assert _put(store, (3,)) == 1
        assert store.lookup(keys_of((1,))).why_not.startswith("evicted from dram")


def test_what_was_refused_is_decided_again_once_it_is_used(tmp_path: Path) -> None:
    policy, key = Scripted(), keys_of((1,))[0]
    policy.refuses.add(key)
    with _open(tmp_path, policy, dram=2) as store:
        _put(store, (1,))
        assert store.flush()
        assert _states(store)[key] is ChunkState.UNBACKED
        policy.refuses.clear()
        assert store.flush()
        assert store.stats()["nvme"]["chunks"] == 0
        assert len(store.get([key])) == 1
        assert _states(store)[key] is ChunkState.UNDECIDED
        assert store.flush()
        assert store.stats()["nvme"]["chunks"] == 1


def test_what_nvme_evicts_while_dram_has_it_is_not_written_again_unused(tmp_path: Path) -> None:
    with _open(tmp_path, Scripted(), dram=8, nvme=2) as store:
        _put(store, (1,))
        _put(store, (2,))
        assert store.flush()
        _put(store, (3,))
        assert store.flush()
        states = _states(store)
        assert sorted(states.values()) == [
            ChunkState.CLEAN,
            ChunkState.CLEAN,
            ChunkState.UNBACKED,
        ]
        store.check_integrity()


def test_a_slot_that_is_needed_never_waits_for_a_write(tmp_path: Path) -> None:
    """What is to be written first is no room; what is worthless is."""
    policy = Scripted()
    with _open(tmp_path, policy, dram=4) as store:
        jobs = [store.prepare_store(keys_of((head,))) for head in range(4)]
        for job in jobs[:3]:
            store.complete_store(job)
        policy.refuses.update(keys_of((2,)))
        states = [_states(store)[key] for head in range(3) for key in keys_of((head,))]
        assert states.count(ChunkState.UNDECIDED) >= 2
        new = store.prepare_store(keys_of((9,)))
        assert new.wanted == (0,)  # in place of the only one that may be forgotten
        assert store.lookup(keys_of((2,))).num_chunks == 0
        full = store.prepare_store(keys_of((8,)))
        assert (full.wanted, full.why_not) == ((), "dram is full")
        for job in (jobs[3], new, full):
            store.complete_store(job)
        _settle(store)
        assert _put(store, (8,)) == 1


def test_a_call_decides_a_bounded_number(tmp_path: Path) -> None:
    policy, many = Scripted(), 4 * AT_ONCE
    heads = [(head,) for head in range(many)]
    policy.refuses.update(key for head in heads for key in keys_of(head))
    with _open(tmp_path, policy, dram=many, nvme=many) as store:
        store._cold.cleaner._target = many  # all of it, for the test
        jobs = [store.prepare_store(keys_of(head)) for head in heads]
        for job in jobs[:-1]:
            store._cold.dram.settle(job.chunks[0], ChunkState.UNDECIDED)
            job.done = True
        store.complete_store(jobs[-1])
        assert len(policy.paths) == AT_ONCE
        assert store.busy
        store.poll()
        assert len(policy.paths) == 2 * AT_ONCE
        _settle(store)
        assert len(policy.paths) == many


def test_a_pass_decides_nothing_twice(tmp_path: Path) -> None:
    """On a full NVMe every write makes room of something that DRAM has: without end, otherwise."""
    policy = Scripted()
    with _open(tmp_path, policy, dram=4, nvme=2) as store:
        for head in range(4):
            _put(store, (head,))
        _settle(store)
        assert store.flush()
        decided = [path[-1] for path in policy.paths]
        assert max(map(decided.count, decided)) <= 3


def test_each_pass_decides_anew(tmp_path: Path) -> None:
    policy = Scripted()
    policy.refuses.update(keys_of((1,)))
    with _open(tmp_path, policy, dram=4) as store:
        store._cold.cleaner._target = 4  # all of it
        _put(store, (1,))
        _settle(store)
        assert _states(store)[keys_of((1,))[0]] is ChunkState.UNBACKED
        policy.refuses.clear()
        assert len(store.get(keys_of((1,)))) == 1
        _put(store, (2,))
        _settle(store)
        assert store.stats()["nvme"]["chunks"] == 2


class HeadsOnly(Scripted):
    def decide(self, offer: Offer) -> Decision:
        if offer.boundary is Boundary.ONTO_NVME:
            return Decision(Answer.ADMIT, 1, "one is enough")
        return super().decide(offer)


def test_a_path_goes_down_whole_or_not_at_all(tmp_path: Path) -> None:
    with _open(tmp_path, HeadsOnly()) as store:
        _put(store, (1, 2))
        assert store.flush()
        states = [_states(store)[key] for key in keys_of((1, 2))]
        assert states == [ChunkState.CLEAN, ChunkState.UNBACKED]


def test_what_hangs_from_a_chunk_in_the_queue_is_written_behind_it(tmp_path: Path) -> None:
    with _open(tmp_path, Scripted(), dram=5) as store:
        store._cold.flusher._depth = 1
        store._cold.cleaner._target = 5
        _put(store, (1, 2, 3, 4))
        assert ChunkState.DIRTY in _states(store).values()
        job = store.prepare_store(keys_of((1, 2, 3, 4, 5)))
        store.complete_store(job)
        assert store._cold.cleaner.decide_one()
        assert store.flush()
        assert store.stats()["nvme"]["chunks"] == 5
        store.check_integrity()


def test_making_room_for_a_run_evicts_nothing_of_it(tmp_path: Path) -> None:
    """To stage its first chunk something is written, and takes a place on a full NVMe."""
    with _open(tmp_path, Scripted(), dram=5, nvme=7) as store:
        for chain in ((0, 0, 0, 1, 0), (2, 0, 1), (1, 0), (0, 0, 0, 0, 0), (2, 0, 1, 1)):
            load = store.prepare_load(keys_of(chain))
            found = load.stop
            store.wait_load(load)
            assert load.stop == found
            store.complete_load(load)
            store.complete_store(store.prepare_store(keys_of(chain)))
            _settle(store)
        assert found == 3  # of the last chain, all from NVMe


class Valued(Scripted):
    def order(self, tier: Tier) -> EvictionOrder:
        return ValuedOrder()


def _chain_worth(least: int, most: int, number: int = 0) -> Chain:
    """The number-th chain of one chunk whose worth lies in a range."""
    heads = ((head,) for head in range(10_000) if least <= keys_of((head,))[0][0] % 10 <= most)
    return [head for head, _ in zip(heads, range(number + 1), strict=False)][number]


def test_what_is_worth_less_takes_no_place_and_waits_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Valued()
    dear, cheap = [_chain_worth(6, 9, n) for n in range(2)], _chain_worth(1, 3)
    policy.worth = {key: float(key[0] % 10) for c in (*dear, cheap) for key in keys_of(c)}
    with _open(tmp_path, policy, dram=2) as store:
        for chain in dear:
            _put(store, chain)
        assert store.flush()
        monkeypatch.setattr(store, "_wait_for_room", _never)
        assert _put(store, cheap) == 0
        why_not = "refused by admission: worth less than what is there"
        assert store.lookup(keys_of(cheap)).why_not == why_not
        assert store.stats()["refusals"] == {"into_dram: worth less than what is there": 1}
        store.check_integrity()


def _never(*arguments: object) -> bool:
    raise AssertionError("waited")


def test_on_nvme_too_a_chunk_takes_only_the_place_of_one_worth_less(tmp_path: Path) -> None:
    policy = Valued()
    dear, cheap = _chain_worth(6, 9), _chain_worth(1, 3)
    policy.worth = {key: float(key[0] % 10) for c in (dear, cheap) for key in keys_of(c)}
    with _open(tmp_path, policy, dram=4, nvme=1) as store:
        _put(store, dear)
        assert store.flush()
        _put(store, cheap)
        assert store.flush()
        assert _states(store)[keys_of(cheap)[0]] is ChunkState.UNBACKED
        assert _states(store)[keys_of(dear)[0]] is ChunkState.CLEAN
        assert store.stats()["why_not"] == {"nvme: worth less than what is there": 1}
    with _open(tmp_path, Scripted(), dram=4, nvme=1) as store:
        assert store.lookup(keys_of(dear)).num_chunks == 1


def test_without_an_io_side_dram_goes_on_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Scripted()
    with _open(tmp_path, policy, dram=2) as store:
        with monkeypatch.context() as patch:
            backend = type(store._cold.nvme._io)  # type: ignore[union-attr]  # there is one
            patch.setattr(backend, "alive", False)
            for head in range(5):
                assert _put(store, (head,)) == 1
                store.check_integrity()
            assert policy.paths == []
            assert not store.flush(timeout_s=0.05)
        assert store.flush()
        assert store.stats()["nvme"]["chunks"] >= 1


def test_the_capacity_of_each_tier_is_told_before_anything_else(tmp_path: Path) -> None:
    told: list[object] = []

    class Told(Always):
        def open(self, capacity: object) -> None:
            told.append(capacity)

        def order(self, tier: Tier) -> EvictionOrder:
            told.append(tier)
            return super().order(tier)

    with _open(tmp_path, Told(), dram=3, nvme=7):
        assert told == [{Tier.DRAM: 3, Tier.NVME: 7}, Tier.DRAM, Tier.NVME]
    told.clear()
    config = StoreConfig(dram_bytes=3 * CHUNK_BYTES, admission=Told)
    with TieredStore(replace(config, write_down="late"), NAMESPACE) as store:
        assert told == [{Tier.DRAM: 3}, Tier.DRAM]
        assert store.put(keys_of((1, 2, 3, 4)), chunks_of((1, 2, 3, 4))) == 3
        assert store.flush()


@pytest.mark.parametrize("beside", [False, True])
def test_what_new_chunks_hang_from_is_not_written_over_to_make_room_for_them(
    tmp_path: Path, beside: bool
) -> None:
    """The chunk before them is on NVMe alone, and NVMe is full of it."""
    policy = Scripted()
    policy.refuses.update(keys_of((4,)))
    with _open(tmp_path, policy, dram=3, nvme=1) as store:
        for head in (1, 2, 4):
            job = store.prepare_store(keys_of((head,)))
            store.complete_store(job)
            if head == 1:
                assert store.flush()
        other = store.prepare_store(keys_of((3,)))  # in the slot of (1,)
        chain = keys_of((1, 5))
        new = store.prepare_beside(chain[:1], [b"b" * 32]) if beside else store.prepare_store(chain)
        store.check_integrity()
        store.complete_store(new)
        store.complete_store(other)
        assert store.flush()
        store.check_integrity()
