"""Chunks beside a chain, through the store: what hangs from a chunk shares its fate."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rootcellar.admission.always import Always
from rootcellar.admission.base import Answer, Boundary, Decision, Offer
from rootcellar.admission.frequency_gate import FrequencyGate
from rootcellar.tiers.base import BesideJob, Tier, WriteDown
from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    FILE_BYTES,
    NAMESPACE,
    bytes_of,
    bytes_on_disk,
    chunk_files,
    chunks_of,
    content_of,
    keys_of,
)


def _config(root: Path | None, *, dram: int = 16, nvme: int = 32) -> StoreConfig:
    if root is None:
        return StoreConfig(dram_bytes=dram * CHUNK_BYTES, admission=Always)
    return StoreConfig(
        dram_bytes=dram * CHUNK_BYTES,
        admission=Always,
        nvme_path=root / "store",
        nvme_bytes=nvme * FILE_BYTES,
        io="threads",
    )


def _store(root: Path | None, *, dram: int = 16, nvme: int = 32) -> TieredStore:
    return TieredStore(_config(root, dram=dram, nvme=nvme), NAMESPACE)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with _store(tmp_path) as opened:
        yield opened
        opened.check_integrity()


def _beside(key: bytes) -> bytes:
    return hashlib.sha256(b"beside" + key).digest()


def _prepare(store: TieredStore, chain: tuple[int, ...]) -> BesideJob:
    anchors = keys_of(chain)
    return store.prepare_beside(anchors, [_beside(key) for key in anchors])


def _fill(store: TieredStore, job: BesideJob) -> BesideJob:
    for index, view in zip(job.wanted, store.store_views(job), strict=True):
        content = bytearray(content_of(tuple(job.keys[index]), CHUNK_BYTES))
        view.copy_(torch.frombuffer(content, dtype=torch.float32).view(view.shape))
    return job


def _put(store: TieredStore, chain: tuple[int, ...]) -> BesideJob:
    """A chain, and a chunk beside each of its own."""
    assert store.put(keys_of(chain), chunks_of(chain)) == len(chain)
    job = _fill(store, _prepare(store, chain))
    store.complete_store(job)
    return job


def _tiers(store: TieredStore, chain: tuple[int, ...]) -> list[Tier | None]:
    """Where the chunk beside each of the chain's is."""
    found = [store.lookup([_beside(key)]).tiers for key in keys_of(chain)]
    return [tiers[0] if tiers else None for tiers in found]


def _check(store: TieredStore, chain: tuple[int, ...], indices: Sequence[int]) -> None:
    """Those and no others are served, byte for byte."""
    for index, key in enumerate(keys_of(chain)):
        got = [bytes_of(tensor) for tensor in store.get([_beside(key)])]
        expected = content_of(tuple(_beside(key)), CHUNK_BYTES)
        assert got == ([expected] if index in indices else [])


def test_it_is_served_from_dram_and_wanted_once(store: TieredStore) -> None:
    assert _put(store, (1, 2, 3)).wanted == (0, 1, 2)
    assert _tiers(store, (1, 2, 3)) == [Tier.DRAM] * 3
    _check(store, (1, 2, 3), [0, 1, 2])
    again = _put(store, (1, 2, 3, 4))
    assert (again.wanted, again.why_not) == ((3,), "")
    assert store.stats()["dram"]["slots_used"] == 8


def test_it_is_served_from_nvme_after_a_restart(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        _put(store, (1, 2))
    with _store(tmp_path) as store:
        assert _tiers(store, (1, 2)) == [Tier.NVME] * 2
        _check(store, (1, 2), [0, 1])
        assert len(store.get(keys_of((1, 2)))) == 2
        store.check_integrity()


def test_it_is_promoted_if_its_anchor_was(tmp_path: Path) -> None:
    config = replace(_config(tmp_path), admission=FrequencyGate)
    with _store(tmp_path) as store:
        _put(store, (1, 2))
    with TieredStore(config, NAMESPACE) as store:
        _check(store, (1, 2), [0, 1])
        assert _tiers(store, (1, 2)) == [Tier.NVME] * 2
        store.observe(keys_of((1,)))
        store.observe(keys_of((1, 2)))
        assert len(store.get(keys_of((1, 2)))) == 2  # of which the gate promotes the first
        _check(store, (1, 2), [0, 1])
        assert _tiers(store, (1, 2)) == [Tier.DRAM, Tier.NVME]
        store.check_integrity()


def test_without_an_anchor_it_is_not_wanted(store: TieredStore) -> None:
    store.put(keys_of((1,)), chunks_of((1,)))
    job = _fill(store, _prepare(store, (1, 2)))
    assert (job.wanted, job.why_not) == ((0,), "the chunk it hangs from is not here")
    store.complete_store(job)
    _check(store, (1, 2), [0])
    why_not = store.lookup([_beside(keys_of((1, 2))[1])]).why_not
    assert why_not == "the chunk it hangs from is not here"


def test_several_may_hang_from_one(store: TieredStore) -> None:
    anchor = keys_of((1,))[0]
    store.put([anchor], chunks_of((1,)))
    keys = [_beside(anchor), _beside(_beside(anchor))]
    job = store.prepare_beside([anchor, anchor], keys)
    assert job.wanted == (0, 1)
    store.complete_store(_fill(store, job))
    assert [store.lookup([key]).num_chunks for key in keys] == [1, 1]


def test_it_is_not_served_before_its_store_completes(store: TieredStore) -> None:
    store.put(keys_of((1,)), chunks_of((1,)))
    key, job = _beside(keys_of((1,))[0]), _prepare(store, (1,))
    assert store.lookup([key]).why_not == "being written"
    load = store.prepare_load([key])
    assert (load.stop, load.why_not) == (0, "being written")
    store.complete_load(load)
    assert _prepare(store, (1,)).wanted == ()
    store.complete_store(_fill(store, job))
    _check(store, (1,), [0])


def test_a_failed_store_leaves_nothing_behind(store: TieredStore) -> None:
    store.put(keys_of((1, 2)), chunks_of((1, 2)))
    store.complete_store(_prepare(store, (1, 2)), success=False)
    assert _tiers(store, (1, 2)) == [None, None]
    assert store.stats()["dram"]["slots_used"] == 2
    assert store.flush()
    assert len(store.get(keys_of((1, 2)))) == 2


def test_a_failed_store_of_its_anchor_takes_it_along(store: TieredStore) -> None:
    chain = store.prepare_store(keys_of((1, 2)))
    done, under_way = _prepare(store, (1,)), _prepare(store, (1, 2))
    assert (done.wanted, under_way.wanted) == ((0,), (1,))
    store.complete_store(_fill(store, done))
    store.complete_store(chain, success=False)
    store.complete_store(_fill(store, under_way))
    assert _tiers(store, (1, 2)) == [None, None]
    assert store.stats()["dram"]["slots_used"] == 0


def test_it_waits_for_an_anchor_that_is_written_later(store: TieredStore) -> None:
    chain = store.prepare_store(keys_of((1, 2)))
    store.complete_store(_fill(store, _prepare(store, (1, 2))))
    assert store.flush()
    assert store.stats()["nvme"]["chunks"] == 0
    store.complete_store(chain)
    assert store.flush()
    assert store.stats()["nvme"]["chunks"] == 4


class KeepsOffNvme(Always):
    def decide(self, offer: Offer) -> Decision:
        if offer.boundary is Boundary.ONTO_NVME:
            return Decision(Answer.REJECT, 0, "not worth a write")
        return super().decide(offer)


@pytest.mark.parametrize("anchor_first", [True, False])
def test_it_stays_in_dram_if_its_anchor_does(tmp_path: Path, anchor_first: bool) -> None:
    config = replace(_config(tmp_path), admission=KeepsOffNvme)
    with TieredStore(config, NAMESPACE) as store:
        chain = store.prepare_store(keys_of((1, 2)))
        beside = _fill(store, _prepare(store, (1, 2)))
        for job in (chain, beside) if anchor_first else (beside, chain):
            store.complete_store(job)
        assert store.flush()
        _check(store, (1, 2), [0, 1])
        assert chunk_files(tmp_path / "store") == []
        assert store.stats()["refusals"] == {"onto_nvme: not worth a write": 2}


class Listening(Always):
    def __init__(self) -> None:
        self.offered: set[bytes] = set()

    def decide(self, offer: Offer) -> Decision:
        self.offered.update(offer.chain)
        return super().decide(offer)


@pytest.mark.parametrize("write_down", ["late", "eager"])
def test_no_policy_is_asked_for_it(tmp_path: Path, write_down: WriteDown) -> None:
    policy = Listening()
    config = replace(_config(tmp_path, dram=4), admission=lambda: policy, write_down=write_down)
    with TieredStore(config, NAMESPACE) as store:
        _put(store, (1, 2))
        assert store.flush()
        assert store.stats()["nvme"]["chunks"] == 4
    assert policy.offered == set(keys_of((1, 2)))


def test_it_goes_down_when_its_anchor_did_meanwhile(tmp_path: Path) -> None:
    policy = KeepsOffNvme()
    config = replace(_config(tmp_path), admission=lambda: policy)
    with TieredStore(config, NAMESPACE) as store:
        _put(store, (1,))
        policy.decide = Always().decide  # type: ignore[method-assign]  # it changed its mind
        _put(store, (1,))
        assert store.flush()
        assert store.stats()["nvme"]["chunks"] == 2


def test_it_is_evicted_before_its_anchor_and_a_chain_from_its_end() -> None:
    with _store(None, dram=4) as store:
        _put(store, (1, 2))
        left = [(2, [Tier.DRAM, None]), (1, [Tier.DRAM, None]), (1, [None, None])]
        for number, (num_chunks, beside) in enumerate(left):
            store.complete_store(store.prepare_store(keys_of((7, 8, 9)[: number + 1])))
            assert store.lookup(keys_of((1, 2))).num_chunks == num_chunks
            assert _tiers(store, (1, 2)) == beside
            store.check_integrity()


def test_room_for_it_is_never_made_of_its_anchor() -> None:
    with _store(None, dram=2) as store:
        store.put(keys_of((1, 2)), chunks_of((1, 2)))
        job = store.prepare_beside(keys_of((1, 2))[1:], [_beside(keys_of((1, 2))[1])])
        assert (job.wanted, job.why_not) == ((), "dram is full")
        store.complete_store(job)
        assert store.lookup(keys_of((1, 2))).num_chunks == 2
        store.check_integrity()


def test_room_for_one_is_never_made_of_another_of_the_same_job() -> None:
    with _store(None, dram=4) as store:
        _put(store, (1,))
        store.put(keys_of((1, 2)), chunks_of((1, 2)))
        store.put(keys_of((7,)), chunks_of((7,)))
        load = store.prepare_load(keys_of((7,)))  # all but the first one beside must stay
        job = _prepare(store, (1, 2))
        assert (job.wanted, job.why_not) == ((), "dram is full")
        store.complete_store(job)
        store.complete_load(load)
        assert _tiers(store, (1, 2)) == [Tier.DRAM, None]
        store.check_integrity()


def test_on_disk_too_it_goes_before_its_anchor(tmp_path: Path) -> None:
    config = replace(_config(tmp_path, dram=4, nvme=4), write_down="eager")
    with TieredStore(config, NAMESPACE) as store:
        _put(store, (1, 2))
        store.flush()
        store.put(keys_of((7, 8)), chunks_of((7, 8)))
        store.flush()
        store.check_integrity()
    with _store(tmp_path, nvme=4) as store:
        assert store.lookup(keys_of((1, 2))).num_chunks == 2
        assert _tiers(store, (1, 2)) == [None, None]


@pytest.mark.parametrize("in_dram", [True, False])
def test_it_is_lost_with_a_corrupt_anchor(tmp_path: Path, in_dram: bool) -> None:
    keys = keys_of((1, 2))
    with _store(tmp_path) as store:
        _put(store, (1, 2))
    with _store(tmp_path) as store:
        if in_dram:
            assert len(store.get([_beside(keys[1])])) == 1
        _spoil(tmp_path, keys[1])
        assert len(store.get(keys)) == 1
        assert _tiers(store, (1, 2)) == [Tier.NVME, None]
        assert store.flush()
        store.check_integrity()
        assert store.stats()["nvme"]["used_bytes"] == bytes_on_disk(tmp_path / "store")
        _put(store, (1, 2))
        _check(store, (1, 2), [0, 1])


def test_a_corrupt_one_costs_its_anchor_nothing(tmp_path: Path) -> None:
    keys = keys_of((1, 2))
    with _store(tmp_path) as store:
        _put(store, (1, 2))
    _spoil(tmp_path, _beside(keys[0]))
    with _store(tmp_path) as store:
        _check(store, (1, 2), [1])
        assert len(store.get(keys)) == 2
        store.check_integrity()


def _spoil(root: Path, key: bytes) -> None:
    path = next(path for path in chunk_files(root / "store") if path.stem == key.hex())
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


def test_its_tokens_are_those_of_its_anchor_and_count_once(store: TieredStore) -> None:
    _put(store, (1, 2))
    store.get(keys_of((1, 2)))
    _check(store, (1, 2), [0, 1])
    assert store.stats()["hit_chunks"]["dram"] == 4
    assert store.stats()["hit_tokens"]["dram"] == 2 * CHUNK_TOKENS


def test_wrong_arguments_are_refused_by_name(store: TieredStore) -> None:
    keys = keys_of((1, 2))
    with pytest.raises(ValueError, match="1 anchors for 2 keys, must be one for each"):
        store.prepare_beside(keys[:1], keys)
    with pytest.raises(ValueError, match="twice"):
        store.prepare_beside(keys, [_beside(keys[0])] * 2)
    with pytest.raises(TypeError, match=r"anchors\[1\] is b'short', must be 32 bytes"):
        store.prepare_beside([keys[0], b"short"], keys)
    with pytest.raises(TypeError, match=r"keys\[0\] is 'a'"):
        store.prepare_beside(keys[:1], ["a"])  # type: ignore[list-item]  # on purpose
