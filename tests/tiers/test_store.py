import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rootcellar.admission.always import Always
from rootcellar.admission.base import Answer, Boundary, Decision, Offer
from rootcellar.admission.frequency_gate import FrequencyGate
from rootcellar.tiers.base import LoadState, Tier
from rootcellar.tiers.config import IoKind, StoreConfig
from rootcellar.tiers.errors import StoreClosedError, StoreLockedError
from rootcellar.tiers.io.base import NO_PARENT, Status
from rootcellar.tiers.io.process import ProcessBackend
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    FILE_BYTES,
    LAYOUT,
    NAMESPACE,
    bytes_of,
    bytes_on_disk,
    chunk_files,
    chunks_of,
    content_of,
    keys_of,
    tensor_of,
)
from rootcellar.tiers.toy import (
    Path as Chain,
)


def _config(root: Path | None, *, dram: int = 8, nvme: int = 32) -> StoreConfig:
    if root is None:
        return StoreConfig(dram_bytes=dram * CHUNK_BYTES, admission=Always)
    return StoreConfig(
        dram_bytes=dram * CHUNK_BYTES,
        admission=Always,
        nvme_path=root / "store",
        nvme_bytes=nvme * FILE_BYTES,
        io="threads",
    )


def _store(root: Path | None, *, dram: int = 8, nvme: int = 32) -> TieredStore:
    return TieredStore(_config(root, dram=dram, nvme=nvme), NAMESPACE)


def _check(store: TieredStore, chain: Chain, expected: int) -> None:
    got = store.get(keys_of(chain))
    assert len(got) == expected
    for index, tensor in enumerate(got):
        assert bytes_of(tensor) == content_of(chain[: index + 1], CHUNK_BYTES)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with _store(tmp_path) as opened:
        yield opened
        opened.check_integrity()


def _put(store: TieredStore, chain: Chain, start: int = 0) -> int:
    return store.put(keys_of(chain), chunks_of(chain, start), start)


# The main path


def test_what_was_put_is_got_from_dram(store: TieredStore) -> None:
    assert _put(store, (1, 2, 3)) == 3
    assert store.lookup(keys_of((1, 2, 3))).tiers == (Tier.DRAM,) * 3
    _check(store, (1, 2, 3), 3)
    _check(store, (1, 2, 4), 2)


def test_what_dram_evicted_is_got_from_nvme_and_promoted(tmp_path: Path) -> None:
    with _store(tmp_path, dram=2) as store:
        _put(store, (1, 2))
        store.flush()
        _put(store, (3, 4))
        store.flush()
        assert store.lookup(keys_of((1, 2))).tiers == (Tier.NVME, Tier.NVME)
        _check(store, (1, 2), 2)
        assert store.lookup(keys_of((1, 2))).tiers == (Tier.DRAM, Tier.DRAM)
        store.check_integrity()


def test_a_chain_longer_than_dram_is_put_and_got_whole(tmp_path: Path) -> None:
    chain = tuple(range(10))
    with _store(tmp_path, dram=2) as store:
        assert _put(store, chain) == 10
        _check(store, chain, 10)


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        _put(store, (1, 2, 3))
    with _store(tmp_path) as store:
        assert store.lookup(keys_of((1, 2, 3))).tiers == (Tier.NVME,) * 3
        _check(store, (1, 2, 3), 3)


def test_without_a_directory_dram_works_alone() -> None:
    with _store(None, dram=2) as store:
        assert _put(store, (1, 2, 3)) == 2
        _check(store, (1, 2, 3), 2)
        assert store.flush()
        _put(store, (4,))
        _check(store, (4,), 1)
        _check(store, (1, 2, 3), 1)
        store.check_integrity()


def test_the_worker_process_serves_the_same_bytes(tmp_path: Path) -> None:
    config = replace(_config(tmp_path, dram=2), io="process")
    with TieredStore(config, NAMESPACE) as store:
        _put(store, (1, 2, 3, 4))
        _check(store, (1, 2, 3, 4), 4)
    with TieredStore(config, NAMESPACE) as store:
        _check(store, (1, 2, 3, 4), 4)


def test_compressed_chunks_come_back_byte_for_byte(tmp_path: Path) -> None:
    config = replace(_config(tmp_path, dram=2), codec="zstd")
    with TieredStore(config, NAMESPACE) as store:
        _put(store, (1, 2, 3, 4))
        _check(store, (1, 2, 3, 4), 4)
        store.flush()
        assert store.stats()["nvme"]["used_bytes"] == bytes_on_disk(tmp_path / "store")


def test_a_tail_chunk_keeps_its_length(store: TieredStore) -> None:
    keys, chunks = keys_of((1, 2)), chunks_of((1, 2))
    tail = chunks[1][:, :, :3]
    assert store.put(keys, [chunks[0], tail]) == 2
    assert store.lookup(keys).num_tokens == CHUNK_TOKENS + 3
    assert torch.equal(store.get(keys)[1].view(torch.int32), tail.contiguous().view(torch.int32))


# Loads and stores in parts


def test_a_chunk_is_not_served_before_its_store_completes(store: TieredStore) -> None:
    job = store.prepare_store(keys_of((1,)))
    assert store.lookup(keys_of((1,))).num_chunks == 0
    assert store.lookup(keys_of((1,))).why_not == "being written"
    store.store_views(job)[0].copy_(chunks_of((1,))[0])
    store.complete_store(job)
    _check(store, (1,), 1)


def test_a_failed_store_leaves_nothing_behind(store: TieredStore) -> None:
    failing = store.prepare_store(keys_of((1, 2)))
    following = store.prepare_store(keys_of((1, 2, 3)))
    assert following.wanted == (2,)
    store.complete_store(failing, success=False)
    store.complete_store(following)
    assert store.lookup(keys_of((1, 2, 3))).num_chunks == 0
    assert store.stats()["dram"]["slots_used"] == 0


def test_two_loads_share_one_read(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        _put(store, (1, 2))
    with _store(tmp_path) as store:
        loads = [store.prepare_load(keys_of((1, 2))) for _ in range(2)]
        assert store.stats()["nvme"]["jobs_in_flight"] == 2
        for load in loads:
            store.wait_load(load)
            assert [bytes_of(view) for view in store.load_views(load)] == [
                content_of((1,), CHUNK_BYTES),
                content_of((1, 2), CHUNK_BYTES),
            ]
        for load in loads:
            store.complete_load(load)
        store.check_integrity()


def test_a_load_cut_short_for_want_of_slots_still_waits_for_its_reads(tmp_path: Path) -> None:
    chain = (1, 2, 3, 4)
    with _store(tmp_path) as store:
        _put(store, chain)
    with _store(tmp_path, dram=2) as store:
        load = store.prepare_load(keys_of(chain))
        assert (load.stop, load.state) == (2, LoadState.PENDING)
        store.wait_load(load)
        assert bytes_of(store.load_views(load)[1]) == content_of((1, 2), CHUNK_BYTES)
        store.complete_load(load)


def test_the_end_of_a_run_makes_room_for_its_beginning(tmp_path: Path) -> None:
    with _store(tmp_path, dram=2) as store:
        _put(store, (1, 2, 3, 4))
        store.flush()
        assert store.lookup(keys_of((1, 2, 3, 4))).tiers[2:] == (Tier.DRAM, Tier.DRAM)
        load = store.prepare_load(keys_of((1, 2, 3, 4)))
        assert (load.start, load.stop) == (0, 2)
        store.complete_load(load)
        store.flush()
        store.check_integrity()


def test_a_load_given_up_early_frees_its_slots_when_the_read_is_done(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        _put(store, (1, 2))
    with _store(tmp_path) as store:
        store.complete_load(store.prepare_load(keys_of((1, 2))))
        store.flush()
        assert store.stats()["dram"]["slots_used"] == 0
        store.check_integrity()


def test_a_loaded_chunk_is_not_evicted_before_the_load_completes(tmp_path: Path) -> None:
    with _store(tmp_path, dram=2) as store:
        _put(store, (1, 2))
        load = store.prepare_load(keys_of((1, 2)))
        store.wait_load(load)
        assert _put(store, (3,)) == 0
        assert [bytes_of(v) for v in store.load_views(load)][1] == content_of((1, 2), CHUNK_BYTES)
        store.complete_load(load)
        assert _put(store, (3,)) == 1


def test_a_load_past_its_deadline_is_a_miss_and_the_slot_waits_for_the_read(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        _put(store, (1, 2))
    with TieredStore(replace(_config(tmp_path), load_timeout_s=1e-9), NAMESPACE) as store:
        load = store.prepare_load(keys_of((1, 2)))
        while load.state is LoadState.PENDING:
            store.poll()
        assert store.load_views(load) in ([], store.load_views(load)[:1])
        store.complete_load(load)
        store.flush()
        assert store.lookup(keys_of((1, 2))).num_chunks == 2
        store.check_integrity()


def test_nothing_is_offered_past_a_gap(store: TieredStore) -> None:
    job = store.prepare_store(keys_of((1, 2, 3)), start=2)
    assert (job.wanted, job.stop) == ((), 0)
    assert job.why_not == "chunk 0 of the chain is not here"
    store.complete_store(job)


def test_chunks_written_by_another_job_are_not_asked_for_again(store: TieredStore) -> None:
    first = store.prepare_store(keys_of((1, 2)))
    second = store.prepare_store(keys_of((1, 2, 3)))
    assert (first.wanted, second.wanted) == ((0, 1), (2,))
    for job, chain in ((second, (1, 2, 3)), (first, (1, 2))):
        for index, view in zip(job.wanted, store.store_views(job), strict=True):
            view.copy_(chunks_of(chain)[index])
        store.complete_store(job)
    assert store.flush()
    assert store.stats()["nvme"]["chunks"] == 3


@pytest.mark.parametrize("start", [0, 1])
def test_a_load_of_what_is_being_written_ends_before_it(store: TieredStore, start: int) -> None:
    keys = keys_of((1, 2, 3))
    _put(store, (1,))
    job = store.prepare_store(keys)
    assert store.lookup(keys).tiers == (Tier.DRAM,)
    load = store.prepare_load(keys, start)
    assert (load.state, load.stop, load.why_not) == (LoadState.READY, 1, "being written")
    assert len(store.load_views(load)) == 1 - start
    store.complete_load(load)
    for path, view in zip(((1, 2), (1, 2, 3)), store.store_views(job), strict=True):
        view.copy_(tensor_of(path))
    store.complete_store(job)
    _check(store, (1, 2, 3), 3)


def test_the_chain_unused_for_longest_goes_whole_before_another_loses_its_end() -> None:
    with _store(None, dram=6) as store:
        _put(store, (1, 2, 3))
        _put(store, (4, 5, 6))
        _put(store, (7, 8))
        assert store.lookup(keys_of((1, 2, 3))).num_chunks == 1
        assert store.lookup(keys_of((4, 5, 6))).num_chunks == 3


def test_pins_are_counted_while_they_last(store: TieredStore) -> None:
    _put(store, (1, 2))
    loads = [store.prepare_load(keys_of((1, 2))), store.prepare_load(keys_of((1,)))]
    assert store.stats()["dram"]["slots_pinned"] == 2
    store.complete_load(loads[0])
    assert store.stats()["dram"]["slots_pinned"] == 1
    store.complete_load(loads[1])
    assert store.stats()["dram"]["slots_pinned"] == 0


@pytest.mark.parametrize("used", [True, False])
def test_a_promotion_that_served_no_other_load_was_wasted(tmp_path: Path, used: bool) -> None:
    with _store(tmp_path) as store:
        _put(store, (1, 2))
    with _store(tmp_path, dram=2) as store:
        _check(store, (1, 2), 2)
        if used:
            _check(store, (1,), 1)
        assert store.stats()["wasted_promotions"] == 0
        _put(store, (3, 4))
        assert store.lookup(keys_of((1, 2))).tiers == (Tier.NVME, Tier.NVME)
        stats = store.stats()
        assert (stats["promoted_chunks"], stats["wasted_promotions"]) == (2, 1 if used else 2)


def test_a_load_that_served_nobody_counts_no_hits(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        _put(store, (1, 2))
    with _store(tmp_path) as store:
        load = store.prepare_load(keys_of((1, 2)))
        store.wait_load(load)
        store.complete_load(load, used=False)
        assert store.lookup(keys_of((1, 2))).tiers == (Tier.DRAM, Tier.DRAM)
        assert store.stats()["hit_chunks"] == {"dram": 0, "nvme": 0}
        assert store.stats()["missed_chunks"] == 0


def test_gauges_of_bytes_add_up(tmp_path: Path) -> None:
    with _store(tmp_path, dram=4, nvme=9) as store:
        _put(store, (1, 2))
        store.flush()
        dram, nvme = store.stats()["dram"], store.stats()["nvme"]
        assert (dram["bytes_used"], dram["bytes"]) == (2 * CHUNK_BYTES, 4 * CHUNK_BYTES)
        assert (nvme["used_bytes"], nvme["free_bytes"]) == (2 * FILE_BYTES, 7 * FILE_BYTES)
        assert (nvme["reads_in_flight"], nvme["writes_in_flight"]) == (0, 0)


# Admission


def test_a_gate_lets_a_chain_in_with_its_second_request(tmp_path: Path) -> None:
    with TieredStore(replace(_config(tmp_path), admission=FrequencyGate), NAMESPACE) as store:
        assert _put(store, (1, 2)) == 0
        why_not = store.lookup(keys_of((1, 2))).why_not
        assert why_not == "refused by admission: seen 1 of 2 times"
        assert _put(store, (1, 2)) == 2


class KeepsOffNvme(Always):
    def decide(self, offer: Offer) -> Decision:
        if offer.boundary is Boundary.ONTO_NVME:
            return Decision(Answer.REJECT, 0, "not worth a write")
        return super().decide(offer)


def test_what_nvme_refuses_lives_in_dram_until_evicted(tmp_path: Path) -> None:
    config = replace(_config(tmp_path, dram=2), admission=KeepsOffNvme)
    with TieredStore(config, NAMESPACE) as store:
        _put(store, (1, 2))
        _check(store, (1, 2), 2)
        assert chunk_files(tmp_path / "store") == []
        _put(store, (3,))
        assert store.lookup(keys_of((1, 2))).why_not == "evicted from dram 0 s ago"


class PromotesNothing(Always):
    def decide(self, offer: Offer) -> Decision:
        if offer.boundary is Boundary.NVME_TO_DRAM:
            return Decision(Answer.REJECT, 0, "served in place")
        return super().decide(offer)


def test_a_refused_promotion_serves_from_nvme_and_leaves_dram_as_it_was(tmp_path: Path) -> None:
    config = replace(_config(tmp_path), admission=PromotesNothing)
    with TieredStore(config, NAMESPACE) as store:
        _put(store, (1, 2))
    with TieredStore(config, NAMESPACE) as store:
        for _ in range(2):
            _check(store, (1, 2), 2)
            assert store.lookup(keys_of((1, 2))).tiers == (Tier.NVME, Tier.NVME)


# The disk misbehaves


@pytest.mark.parametrize("fault", ["flip", "truncate", "zero", "delete", "other chunk"])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_bad_file_is_a_miss_and_is_never_offered_again(
    tmp_path: Path, fault: str, bad: int
) -> None:
    with _store(tmp_path) as store:
        _put(store, (1, 2, 3))
    files = {path.stem: path for path in chunk_files(tmp_path / "store")}
    keys = keys_of((1, 2, 3))
    _spoil(files[keys[bad].hex()], fault, files[keys[bad - 1].hex()])
    with _store(tmp_path) as store:
        _check(store, (1, 2, 3), bad)
        assert store.lookup(keys).num_chunks == bad
        store.check_integrity()
        assert store.flush()
        assert store.stats()["nvme"]["used_bytes"] == bytes_on_disk(tmp_path / "store")
        assert _put(store, (1, 2, 3)) == 3
        _check(store, (1, 2, 3), 3)


def _spoil(path: Path, fault: str, other: Path) -> None:
    content = bytearray(path.read_bytes())
    if fault == "delete":
        path.unlink()
        return
    if fault == "flip":
        content[-7] ^= 1
    elif fault == "truncate":
        del content[-100:]
    elif fault == "zero":
        content[:] = bytes(len(content))
    else:
        content[:] = other.read_bytes()
    path.write_bytes(content)


@pytest.mark.parametrize("io", ["threads", "process"])
def test_a_pipe_in_place_of_a_file_is_a_miss(tmp_path: Path, io: IoKind) -> None:
    config = replace(_config(tmp_path), io=io)
    with TieredStore(config, NAMESPACE) as store:
        _put(store, (1,))
    with TieredStore(config, NAMESPACE) as store:
        path = chunk_files(tmp_path / "store")[0]
        path.unlink()
        os.mkfifo(path)
        _check(store, (1,), 0)


def test_a_dead_worker_does_not_cost_a_new_chunk_its_parent(tmp_path: Path) -> None:
    config = replace(_config(tmp_path, dram=1), io="process")
    with TieredStore(config, NAMESPACE) as store:
        parent = store.prepare_store(keys_of((1,)))
        _kill_worker(store)
        store.complete_store(parent)
        store.complete_store(store.prepare_store(keys_of((1, 2))), success=False)
        store.check_integrity()
        assert store.lookup(keys_of((1,))).num_chunks == 1


def _kill_worker(store: TieredStore) -> None:
    backend = store._cold.nvme._io  # type: ignore[union-attr]  # there is a directory
    assert isinstance(backend, ProcessBackend)
    assert backend.worker_pid is not None
    os.kill(backend.worker_pid, signal.SIGKILL)
    while backend.alive:
        backend.wait(0.01)


def test_a_file_spoilt_while_the_store_is_open_is_a_miss(tmp_path: Path) -> None:
    with _store(tmp_path, dram=2) as store:
        _put(store, (1, 2, 3, 4))
        store.flush()
        for path in chunk_files(tmp_path / "store"):
            _spoil(path, "flip", path)
        keys = keys_of((1, 2, 3, 4))
        in_dram = store.lookup(keys).tiers.count(Tier.DRAM)
        assert in_dram <= 2
        _check(store, (1, 2, 3, 4), 0)
        assert store.stats()["nvme"]["corrupt_chunks"] >= 1
        store.check_integrity()


def test_what_dram_holds_below_a_chunk_that_went_bad_is_given_up(tmp_path: Path) -> None:
    chain = (1, 2, 3, 4)
    with _store(tmp_path) as store:
        _put(store, chain)
    with _store(tmp_path) as store:
        store.get(keys_of(chain), start=3)  # the last one is in DRAM now, without those before it
        path = next(p for p in chunk_files(tmp_path / "store") if p.stem == keys_of(chain)[1].hex())
        _spoil(path, "flip", path)
        _check(store, chain, 1)
        store.flush()  # until the last read has let go of its slot
        assert store.stats()["dram"]["slots_used"] == 1
        store.check_integrity()
        assert _put(store, chain) == 4
        _check(store, chain, 4)


# Budgets


def test_the_disk_budget_holds_at_every_moment(tmp_path: Path) -> None:
    with _store(tmp_path, dram=4, nvme=5) as store:
        for head in range(12):
            _put(store, (head, 1, 2))
            assert bytes_on_disk(tmp_path / "store") <= 5 * FILE_BYTES
            store.check_integrity()
        store.flush()
        assert bytes_on_disk(tmp_path / "store") == 5 * FILE_BYTES
        _check(store, (11, 1, 2), 3)


def test_a_smaller_budget_is_met_when_the_store_opens(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        _put(store, tuple(range(8)))
    with _store(tmp_path, nvme=3) as store:
        store.check_integrity()
        store.flush()
        assert bytes_on_disk(tmp_path / "store") <= 3 * FILE_BYTES
        _check(store, tuple(range(8)), 3)


# Namespaces


def test_another_namespace_shares_nothing_but_the_budget(tmp_path: Path) -> None:
    other = replace(NAMESPACE, revision="2")
    with _store(tmp_path) as store:
        _put(store, (1, 2))
    with TieredStore(_config(tmp_path), other) as store:
        assert store.get(keys_of((1, 2))) == []
        assert store.get(keys_of((1, 2), other)) == []
        store.check_integrity()
    with _store(tmp_path) as store:
        _check(store, (1, 2), 2)


def test_namespaces_that_bring_the_same_keys_are_kept_apart(tmp_path: Path) -> None:
    others = [replace(NAMESPACE, revision=str(n)) for n in (2, 3)]
    keys = keys_of((1, 2))
    for namespace in (*others, NAMESPACE, *others):  # an engine's own hashes may know no namespace
        with TieredStore(_config(tmp_path), namespace) as store:
            store.put(keys, chunks_of((1, 2)))
            store.flush()
            store.check_integrity()
            assert store.stats()["nvme"]["used_bytes"] == bytes_on_disk(tmp_path / "store")
            _check(store, (1, 2), 2)


def test_the_process_may_change_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with TieredStore(replace(_config(tmp_path), nvme_path="store"), NAMESPACE) as store:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        _put(store, (1, 2))
        store.invalidate()
        _put(store, (3,))
    with _store(tmp_path) as store:
        _check(store, (3,), 1)


def test_chunks_of_another_namespace_make_room_when_they_are_older(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        _put(store, (1, 2, 3))
    other = replace(NAMESPACE, revision="2")
    with TieredStore(_config(tmp_path, nvme=4), other) as store:
        keys = keys_of((1, 2), other)
        store.put(keys, chunks_of((1, 2)))
        store.flush()
        assert len(store.get(keys)) == 2
        assert bytes_on_disk(tmp_path / "store") <= 4 * FILE_BYTES
    with _store(tmp_path, nvme=4) as store:
        _check(store, (1, 2, 3), 2)


def test_invalidated_chunks_are_gone_here_and_after_a_restart(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        _put(store, (1, 2))
        store.invalidate()
        _check(store, (1, 2), 0)
        assert store.flush()
        assert bytes_on_disk(tmp_path / "store") == 0
        _put(store, (3,))
        store.check_integrity()
    with _store(tmp_path) as store:
        _check(store, (1, 2), 0)
        _check(store, (3,), 1)


def test_what_is_stored_for_a_successor_does_not_outlive_the_process(tmp_path: Path) -> None:
    successor = replace(NAMESPACE, revision="updated in place")
    with _store(tmp_path) as store:
        _put(store, (1, 2))
        job = store.prepare_store(keys_of((5,)))
        store.invalidate(successor)
        store.complete_store(job)
        assert store.namespace == successor
        _check(store, (1, 2), 0)
        _put(store, (1,))
        _check(store, (1,), 1)
        store.check_integrity()
        store.invalidate()
        _put(store, (1,))
        _check(store, (1,), 1)
        assert store.flush()
    for namespace in (successor, NAMESPACE):
        with TieredStore(_config(tmp_path), namespace) as store:
            _check(store, (1, 2), 0)
            assert store.lookup(keys_of((5,))).num_chunks == 0
            assert store.flush()
            assert store.stats()["nvme"]["used_bytes"] == bytes_on_disk(tmp_path / "store")


def test_a_successor_that_the_store_already_knows_serves_nothing_of_before(
    tmp_path: Path,
) -> None:
    successor = replace(NAMESPACE, revision="2")
    with TieredStore(_config(tmp_path), successor) as store:
        _put(store, (1, 2, 3))
    with _store(tmp_path) as store:
        _put(store, (4,))
        store.invalidate(successor)
        _check(store, (1, 2, 3), 0)
        _put(store, (1,))
        store.invalidate(NAMESPACE)
        _put(store, (4,))
        store.invalidate(successor)
        _put(store, (1, 7))
        assert store.flush()
        store.check_integrity()
        assert store.stats()["nvme"]["used_bytes"] == bytes_on_disk(tmp_path / "store")
    with TieredStore(_config(tmp_path), successor) as store:  # what it had before all that
        _check(store, (1, 2, 3), 3)
        _check(store, (1, 7), 1)
        _check(store, (4,), 0)
        store.flush()
        assert store.stats()["nvme"]["used_bytes"] == bytes_on_disk(tmp_path / "store")


def test_a_successor_of_another_shape_is_refused(store: TieredStore) -> None:
    _put(store, (1,))
    other = replace(NAMESPACE, layout=replace(LAYOUT, num_layers=3))
    with pytest.raises(ValueError, match="successor has layout KVLayout"):
        store.invalidate(other)
    _check(store, (1,), 1)
    assert store.namespace == NAMESPACE


def test_a_load_that_is_ready_is_empty_after_an_invalidation(store: TieredStore) -> None:
    _put(store, (1, 2))
    load = store.prepare_load(keys_of((1, 2)))
    store.wait_load(load)
    assert len(store.load_views(load)) == 2
    store.invalidate()
    assert store.load_views(load) == []
    store.complete_load(load)
    store.flush()
    assert store.stats()["dram"]["slots_used"] == 0


def test_what_is_under_way_when_the_namespace_is_invalidated_is_never_served(
    tmp_path: Path,
) -> None:
    with _store(tmp_path) as store:
        _put(store, (1, 2))
    with _store(tmp_path) as store:
        load, job = store.prepare_load(keys_of((1, 2))), store.prepare_store(keys_of((5,)))
        store.invalidate()
        store.complete_store(job)
        store.wait_load(load)
        assert store.load_views(load) == []
        store.complete_load(load)
        assert store.flush()
        for chain in ((1, 2), (5,)):
            assert store.lookup(keys_of(chain)).num_chunks == 0
        assert store.stats()["dram"]["slots_used"] == 0
        store.check_integrity()


# Wrong arguments


def test_wrong_tensors_are_refused_by_name_before_anything_changes(store: TieredStore) -> None:
    keys, good = keys_of((1, 2)), chunks_of((1, 2))
    with pytest.raises(ValueError, match=r"tensors\[1\] has shape"):
        store.put(keys, [good[0], good[1][:1]])
    with pytest.raises(ValueError, match=r"tensors\[0\] has shape"):
        store.put(keys, [good[0][:, :, :3], good[1]])
    with pytest.raises(ValueError, match=r"tensors\[0\] has dtype torch.float16"):
        store.put(keys, [good[0].half(), good[1]])
    with pytest.raises(TypeError, match=r"tensors\[0\] is a int"):
        store.put(keys, [1, 2])  # type: ignore[list-item]  # on purpose
    with pytest.raises(ValueError, match="3 tensors from chunk 0 on, but 2 keys"):
        store.put(keys, [*good, good[0]])
    assert store.stats()["dram"]["slots_used"] == 0


@pytest.mark.parametrize("keys", [["a"], [b"short"], [1], [bytearray(32)], "text"], ids=repr)
def test_keys_of_the_wrong_type_are_refused_by_position(
    store: TieredStore, keys: list[bytes]
) -> None:
    for verb in (store.lookup, store.get, store.prepare_load, store.prepare_store, store.observe):
        with pytest.raises(TypeError, match=r"keys\[0\] is"):
            verb(keys)


def test_a_key_that_stands_twice_is_refused(store: TieredStore) -> None:
    with pytest.raises(ValueError, match="twice"):
        store.put(keys_of((1,)) * 2, chunks_of((1,)) * 2)
    assert store.stats()["dram"]["slots_used"] == 0


@pytest.mark.parametrize("start", [-1, 3, 1.0, None, True])
def test_a_start_outside_the_chain_is_refused(store: TieredStore, start: int) -> None:
    with pytest.raises(ValueError, match="start is"):
        store.prepare_load(keys_of((1, 2)), start)


def test_completing_twice_is_refused(store: TieredStore) -> None:
    load, job = store.prepare_load(keys_of((1,))), store.prepare_store(keys_of((1,)))
    store.complete_load(load)
    store.complete_store(job)
    with pytest.raises(ValueError, match="twice"):
        store.complete_load(load)
    with pytest.raises(ValueError, match="twice"):
        store.complete_store(job)


def test_a_closed_store_says_so_and_closes_again_quietly(tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreClosedError):
        store.lookup([])


def test_a_second_opener_is_told_who_holds_the_store(tmp_path: Path, store: TieredStore) -> None:
    with pytest.raises(StoreLockedError, match=str(os.getpid())):
        _store(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dram_bytes": CHUNK_BYTES - 1}, "dram_bytes is 4095, must be at least one chunk of 4096"),
        ({"dram_bytes": 1 << 60}, "more than this machine's"),
        ({"nvme_bytes": FILE_BYTES - 1}, "nvme_bytes is 8191, must be at least one chunk file"),
    ],
)
def test_budgets_the_layout_or_machine_cannot_have_are_refused_before_anything_is_made(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TieredStore(replace(_config(tmp_path), **changes), NAMESPACE)  # type: ignore[arg-type]  # by name
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_a_closed_store_is_left_open(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    _store(tmp_path).close()  # libraries open what they keep
    before = open_files()
    for _ in range(3):
        with _store(tmp_path) as store:
            _put(store, (1,))
    assert open_files() == before


def test_the_layout_of_the_toys_is_one_page_a_chunk() -> None:
    assert LAYOUT.chunk_bytes == CHUNK_BYTES == 4096


def test_a_put_waits_for_an_arena_that_is_still_being_populated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rootcellar.tiers.arena.STEP_BYTES", CHUNK_BYTES)
    with _store(None, dram=512) as store:  # a step, and a system call, per chunk
        assert _put(store, tuple(range(400))) == 400


@pytest.mark.parametrize("io", ["threads", "process"])
def test_a_process_that_closes_no_store_ends_all_the_same(tmp_path: Path, io: str) -> None:
    script = f"""
from rootcellar.tiers.config import IoKind, StoreConfig
from rootcellar.tiers.io.process import ProcessBackend
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import *

config = StoreConfig(
    dram_bytes=4 * CHUNK_BYTES,
    nvme_path={str(tmp_path / "store")!r},
    nvme_bytes=9 * FILE_BYTES,
    io={io!r},
)
store = TieredStore(config, NAMESPACE)
assert store.put(keys_of((1, 2)), chunks_of((1, 2))) == 2
assert store.flush()
"""
    subprocess.run([sys.executable, "-P", "-c", script], check=True, timeout=60)
    with _store(tmp_path) as store:
        _check(store, (1, 2), 2)


def test_a_partial_hit_counts_what_is_missing_once() -> None:
    with _store(None) as store:
        _put(store, (1, 2))
        assert len(store.get(keys_of((1, 2, 3, 4)))) == 2
        assert store.stats()["missed_chunks"] == 2


def test_a_put_after_its_request_was_told_of_is_no_other_request() -> None:
    gate = FrequencyGate(min_seen=2)
    config = replace(_config(None), admission=lambda: gate)
    with TieredStore(config, NAMESPACE) as store:
        keys = keys_of((1, 2))
        store.observe(keys)
        assert _put(store, (1, 2)) == 0
        assert list(gate.counts(keys)) == [1, 1]
        assert _put(store, (1, 2)) == 2  # another one
        assert list(gate.counts(keys)) == [2, 2]


def test_a_chunk_whose_parent_failed_in_the_same_poll_is_not_taken_for_written(
    tmp_path: Path,
) -> None:
    """Both writes ended before anybody looked: the good one is told of first."""
    with TieredStore(replace(_config(tmp_path), write_down="eager"), NAMESPACE) as store:
        ledger: Any = store._cold.nvme._ledger  # type: ignore[union-attr]
        poll, ended = ledger.poll, list[Any]()

        def child_first() -> list[Any]:
            ended.extend(poll())
            if len(ended) < 2:
                return []
            (job, done, released), child = sorted(
                ended, key=lambda e: e[0].meta.parent != NO_PARENT
            )
            ledger.poll = poll
            return [child, (job, replace(done, status=Status.FAILED), released)]

        ledger.poll = child_first
        _put(store, (1, 2))
        assert store.flush()
        assert ended
        store.check_integrity()
        assert store.lookup(keys_of((1, 2))).tiers == (Tier.DRAM, Tier.DRAM)
        assert store.stats()["nvme"]["chunks"] == 0
