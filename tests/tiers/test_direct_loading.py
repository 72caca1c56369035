"""Lending files: who gets them, how long they stay, and what is counted; the reader is this file,
which reads them behind the store's back."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rootcellar.admission.always import Always
from rootcellar.admission.base import Answer, Boundary, Decision, Offer
from rootcellar.tiers.base import DirectLoad, LoadState, Tier
from rootcellar.tiers.chunk_file import HEADER_BYTES, matching_digest
from rootcellar.tiers.config import CodecName, StoreConfig
from rootcellar.tiers.errors import StoreClosedError
from rootcellar.tiers.io.base import Status
from rootcellar.tiers.layout import KVLayout, Namespace
from rootcellar.tiers.nvme import NvmeTier
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    FILE_BYTES,
    NAMESPACE,
    bytes_of,
    chunk_files,
    chunks_of,
    content_of,
    keys_of,
)

Chain = tuple[int, ...]
CHAIN = (1, 2, 3, 4)
KEYS = keys_of(CHAIN)
CHAINS = [chain for length in (1, 2, 3, 4) for chain in product((0, 1), repeat=length)]
PATHS = {keys_of(chain)[-1]: chain for chain in CHAINS}
seeds = st.integers(0, 1 << 16)


class NothingComesUp(Always):
    """Lets all into DRAM and onto NVMe, and nothing from there into DRAM."""

    def decide(self, offer: Offer) -> Decision:
        if offer.boundary is Boundary.NVME_TO_DRAM:
            return Decision(Answer.REJECT, offer.start, "never")
        return super().decide(offer)


class OnlyTheHeadComesUp(Always):
    def decide(self, offer: Offer) -> Decision:
        if offer.boundary is Boundary.NVME_TO_DRAM:
            answer = Answer.ADMIT if offer.start == 0 else Answer.REJECT
            return Decision(answer, max(offer.start, 1), "only the head")
        return super().decide(offer)


def open_store(
    root: Path,
    admission: type[Always] = NothingComesUp,
    *,
    dram: int = 4,
    nvme: int = 8,
) -> TieredStore:
    config = StoreConfig(
        dram_bytes=dram * CHUNK_BYTES,
        nvme_path=root / "store",
        nvme_bytes=nvme * FILE_BYTES,
        io="threads",
        admission=admission,
    )
    return TieredStore(config, NAMESPACE)


def fill(root: Path, chain: Chain = CHAIN) -> None:
    """A store that holds the chain on NVMe, and was closed."""
    with open_store(root) as store:
        store.put(keys_of(chain), chunks_of(chain))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    """CHAIN is on NVMe alone."""
    fill(tmp_path)
    with open_store(tmp_path) as opened:
        yield opened
        opened.check_integrity()
        assert opened.stats()["open_loads"] == 0


def _lend(store: TieredStore, start: int = 0, max_chunks: int = 99) -> DirectLoad:
    load = store.prepare_direct(KEYS, start, max_chunks)
    assert load is not None
    return load


def _read(load: DirectLoad, index: int) -> bytes | None:
    """The chunk's bytes, if its file holds them; None if it does not."""
    file = load.files[index]
    try:
        content = Path(file.path).read_bytes()
    except FileNotFoundError:
        return None
    payload = content[HEADER_BYTES:][: file.meta.stored_bytes]
    digest = matching_digest(content[:HEADER_BYTES], file.meta)
    return payload if xxhash.xxh3_128_digest(payload) == digest else None


# What is lent


def test_chunks_that_are_on_nvme_alone_are_lent_and_can_be_verified(store: TieredStore) -> None:
    load = _lend(store)
    assert (load.start, load.stop) == (0, 4)
    for index in range(4):
        assert _read(load, index) == content_of(CHAIN[: index + 1], CHUNK_BYTES)
    store.complete_direct(load, 4, Status.OK)
    stats = store.stats()
    assert stats["hit_chunks"] == {"dram": 0, "nvme": 4}
    assert stats["hit_tokens"] == {"dram": 0, "nvme": 4 * CHUNK_TOKENS}
    assert stats["missed_chunks"] == 0
    assert stats["nvme"]["direct_chunks"] == 4
    assert stats["dram"]["slots_used"] == 0, "it went through DRAM"


def test_what_another_load_brings_to_dram_is_not_lent(store: TieredStore) -> None:
    load = store.prepare_load(KEYS[:1])
    assert store.prepare_direct(KEYS, 0, 99) is None
    store.wait_load(load)
    store.complete_load(load)
    store.complete_direct(_lend(store), 4, Status.OK)  # nothing of it stayed


def test_the_run_begins_behind_what_dram_has_and_ends_before_it(tmp_path: Path) -> None:
    fill(tmp_path)
    with open_store(tmp_path, OnlyTheHeadComesUp) as store:
        store.get(KEYS[:1])
        load = _lend(store)
        assert (load.start, load.stop) == (1, 4)
        first = store.prepare_load(KEYS[: load.start])
        assert first.state is LoadState.READY
        store.complete_load(first)
        store.complete_direct(load, 3, Status.OK)
        assert store.stats()["hit_chunks"] == {"dram": 1, "nvme": 4}


def test_no_more_than_asked_for_is_lent(store: TieredStore) -> None:
    load = _lend(store, 1, max_chunks=2)
    assert (load.start, load.stop, len(load.files)) == (1, 3, 2)
    store.complete_direct(load, 2, Status.OK)
    assert store.stats()["missed_chunks"] == 0, "the last was not asked for yet"
    assert store.prepare_direct(KEYS, 1, 0) is None
    assert store.prepare_direct(KEYS, 4, 9) is None


def test_what_admission_would_have_in_dram_is_not_lent(tmp_path: Path) -> None:
    fill(tmp_path)
    with open_store(tmp_path, OnlyTheHeadComesUp) as store:
        assert store.prepare_direct(KEYS, 0, 99) is None
        assert store.prepare_direct(KEYS, 1, 99) is not None
    with open_store(tmp_path, Always) as store:
        assert store.prepare_direct(KEYS, 1, 99) is None


def test_what_is_not_here_or_hangs_beside_a_chunk_is_not_lent(store: TieredStore) -> None:
    assert store.prepare_direct(keys_of((9, 9)), 0, 99) is None
    [key] = keys_of((7,))
    job = store.prepare_beside(KEYS[:1], [key])
    for view in store.store_views(job):
        view.zero_()
    store.complete_store(job)
    assert store.flush()
    while store._cold.dram.get(key) is not None:  # until it is on NVMe alone
        store.put(keys_of((6, 6, 6, 6)), chunks_of((6, 6, 6, 6)))
    assert store.lookup([key]).tiers == (Tier.NVME,)
    assert store.prepare_direct([key], 0, 99) is None


@pytest.mark.parametrize(
    ("head_dim", "tokens", "codec", "lent"),
    [(512, 8, "zstd", False), (512, 8, "raw", True), (8, 3, "raw", False), (8, 4, "raw", True)],
)
def test_what_is_compressed_or_too_small_to_verify_on_a_device_is_not_lent(
    tmp_path: Path, head_dim: int, tokens: int, codec: CodecName, lent: bool
) -> None:
    layout = KVLayout(
        num_layers=1, num_kv_heads=1, head_dim=head_dim, dtype="float32", chunk_tokens=8
    )
    namespace, key = Namespace(model="tests/tiny", revision="1", layout=layout), bytes(32)
    config = StoreConfig(
        dram_bytes=1 << 16,
        nvme_path=tmp_path / "store",
        nvme_bytes=1 << 20,
        io="threads",
        codec=codec,
        admission=NothingComesUp,
    )
    with TieredStore(config, namespace) as store:
        job = store.prepare_store([key], tail_tokens=tokens)
        for view in store.store_views(job):
            view.copy_(torch.arange(view.numel()).view(view.shape))  # compresses
        store.complete_store(job)
    with TieredStore(config, namespace) as store:
        assert store.lookup([key]).tiers == (Tier.NVME,)
        assert (store.prepare_direct([key], 0, 1) is not None) == lent


def test_without_nvme_nothing_is_lent() -> None:
    config = StoreConfig(dram_bytes=4 * CHUNK_BYTES, admission=NothingComesUp)
    with TieredStore(config, NAMESPACE) as store:
        store.put(KEYS, chunks_of(CHAIN))
        assert store.prepare_direct(KEYS, 0, 99) is None


def test_what_is_not_worth_loading_is_not_lent(store: TieredStore) -> None:
    for _ in range(20):
        store.observe_prefill(CHUNK_TOKENS, 1e-9)
    for tokens in (1, 2):
        for _ in range(20):
            store._cold.load_times._cost.observe_load(Tier.NVME, tokens * CHUNK_BYTES, 5.0)
    assert store.prepare_direct(KEYS, 0, 99) is None


# How long it stays


def test_a_lent_file_is_not_evicted_until_it_is_given_back(tmp_path: Path) -> None:
    fill(tmp_path)
    with open_store(tmp_path, nvme=4) as store:
        load = _lend(store)
        other = (8, 8, 8, 8)
        store.put(keys_of(other), chunks_of(other))
        assert store.flush()
        assert all(_read(load, index) is not None for index in range(4))
        store.complete_direct(load, 4, Status.OK)
        store.put(keys_of((9, 9, 9, 9)), chunks_of((9, 9, 9, 9)))
        assert store.flush()
        assert store.lookup(KEYS).num_chunks < 4


def test_after_invalidate_nothing_lent_is_served(store: TieredStore) -> None:
    load = _lend(store)
    store.invalidate()
    assert load.start == load.stop
    store.complete_direct(load, 4, Status.OK)
    assert store.stats()["hit_chunks"]["nvme"] == 0
    assert store.stats()["nvme"]["direct_chunks"] == 0
    assert store.stats()["missed_chunks"] == 4


def test_a_bad_verdict_on_a_file_of_before_an_invalidate_drops_nothing(store: TieredStore) -> None:
    load = _lend(store)
    store.invalidate()
    store.put(KEYS, chunks_of(CHAIN))
    assert store.flush()
    store.complete_direct(load, 0, Status.CORRUPT)
    assert store.stats()["nvme"]["chunks"] == 4


def test_closing_the_store_cuts_what_is_lent(tmp_path: Path) -> None:
    fill(tmp_path)
    store = open_store(tmp_path)
    load = _lend(store)
    store.close()
    assert load.start == load.stop
    assert load.done
    with pytest.raises(StoreClosedError):
        store.complete_direct(load, 4, Status.OK)


# How it ends


@pytest.mark.parametrize("status", [Status.CORRUPT, Status.MISSING, Status.FAILED])
def test_a_chunk_found_bad_is_counted_dropped_and_never_offered_again(
    store: TieredStore, status: Status
) -> None:
    load = _lend(store)
    store.complete_direct(load, 2, status)
    stats = store.stats()
    assert stats["nvme"]["corrupt_chunks"] == 1
    assert stats["hit_chunks"]["nvme"] == 2
    assert stats["missed_chunks"] == 2
    assert store.lookup(KEYS).num_chunks == 2
    store.check_integrity()
    assert store.flush()
    assert [Path(file.path).exists() for file in load.files] == [True, True, False, False]


def test_a_chunk_of_which_nothing_is_known_is_a_miss_and_stays(store: TieredStore) -> None:
    store.complete_direct(_lend(store), 1, Status.UNAVAILABLE)
    assert store.stats()["missed_chunks"] == 3
    assert store.lookup(KEYS).num_chunks == 4


def test_what_nobody_used_counts_neither_way(store: TieredStore) -> None:
    store.complete_direct(_lend(store), 4, Status.OK, used=False)
    assert store.stats()["hit_chunks"]["nvme"] == 0
    assert store.stats()["missed_chunks"] == 0
    store.complete_direct(_lend(store), 1, Status.CORRUPT, used=False)
    assert store.lookup(KEYS).num_chunks == 1, "bad is bad, whoever wanted it"


def test_what_was_served_is_the_last_to_be_evicted(tmp_path: Path) -> None:
    fill(tmp_path, (1,))
    fill(tmp_path, (2,))
    with open_store(tmp_path, nvme=2) as store:
        load = store.prepare_direct(keys_of((1,)), 0, 1)
        assert load is not None
        store.complete_direct(load, 1, Status.OK)
        store.put(keys_of((3,)), chunks_of((3,)))
        assert store.flush()
        assert store.lookup(keys_of((1,))).num_chunks == 1
        assert store.lookup(keys_of((2,))).num_chunks == 0


def test_completing_twice_is_a_mistake(store: TieredStore) -> None:
    load = _lend(store)
    store.complete_direct(load, 0, Status.OK, used=False)
    with pytest.raises(ValueError, match="twice"):
        store.complete_direct(load, 0, Status.OK)


# At any time, among everything else


class LendingMachine:
    """Little DRAM, so that most is on NVMe alone; files are spoilt behind the store's back."""

    common: tuple[str, ...] = ("put", "get", "spoil_a_file", "poll")
    rare = ("invalidate", "close")

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.offered: set[bytes] = set()  # since the last invalidation
        self.lent: list[DirectLoad] = []
        self.store = self.open()

    def open(self) -> TieredStore:
        return open_store(self.folder, dram=2)

    def fill(self, rng: random.Random) -> None:
        for _ in range(4):
            self.put(rng)

    def put(self, rng: random.Random) -> None:
        chain = rng.choice(CHAINS)
        self.offered.update(keys_of(chain))
        self.store.put(keys_of(chain), chunks_of(chain))

    def get(self, rng: random.Random) -> None:
        keys = keys_of(rng.choice(CHAINS))
        for key, served in zip(keys, self.store.get(keys), strict=False):
            self.check_served(key, bytes_of(served))

    def spoil_a_file(self, rng: random.Random) -> None:
        """One that is lent, where any is."""
        assert self.store.flush()  # no file is being written or removed
        lent = [Path(file.path) for load in self.lent for file in load.files]
        files = [path for path in lent if path.exists()] or chunk_files(self.folder / "store")
        if files:
            path, how = rng.choice(files), rng.randrange(5)
            if how == 0:
                path.unlink()
            elif how == 1:
                os.truncate(path, rng.randrange(FILE_BYTES))
            elif size := path.stat().st_size:  # in the latter half, which is what it stores
                content = bytearray(path.read_bytes())
                content[rng.randrange(size // 2, size)] ^= 1 << rng.randrange(8)
                path.write_bytes(content)

    def poll(self, rng: random.Random) -> None:
        self.store.poll()

    def invalidate(self, rng: random.Random) -> None:
        self.store.invalidate()
        self.offered.clear()
        assert all(load.start == load.stop for load in self.lent)
        self.fill(rng)

    def close(self, rng: random.Random) -> None:
        """With files lent."""
        self.store.close()
        assert all(load.done and load.start == load.stop for load in self.lent)
        self.lent.clear()
        self.store = self.open()

    def readable(self, rng: random.Random) -> list[Chain]:
        """Chains that end on disk, in any order."""
        found = [PATHS[key] for key in self.store._cold.nvme.readable_keys()]
        return rng.sample(found, len(found))

    def check_served(self, key: bytes, content: bytes) -> None:
        assert content == content_of(PATHS[key], CHUNK_BYTES), "wrong bytes"
        assert key in self.offered, "served what was never stored, or was forgotten"

    def check(self) -> None:
        """After every step."""
        self.store.check_integrity()
        nvme = self.store._cold.nvme
        assert isinstance(nvme, NvmeTier)
        assert nvme.used_bytes <= nvme.budget_bytes
        lent = sum(len(load.files) for load in self.lent)
        assert nvme._num_lent == lent, "not all that is lent is kept, or more than that"

    def tear_down(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @classmethod
    def steps(cls) -> st.SearchStrategy[list[tuple[str, int]]]:
        name = st.sampled_from([*cls.common * 4, *cls.rare])
        return st.lists(st.tuples(name, seeds), min_size=40, max_size=80)

    def run(self, steps: list[tuple[str, int]]) -> None:
        try:
            self.fill(random.Random(len(steps)))
            for name, seed in steps:
                getattr(self, name)(random.Random(seed))
                self.check()
        finally:
            self.tear_down()


class HostMachine(LendingMachine):
    """Files are read by the test."""

    common = (*LendingMachine.common, "lend", "give_back")

    def lend(self, rng: random.Random) -> None:
        for chain in self.readable(rng):
            start, max_chunks = rng.randrange(len(chain)), rng.randint(1, 4)
            if load := self.store.prepare_direct(keys_of(chain), start, max_chunks):
                self.lent.append(load)
                break

    def give_back(self, rng: random.Random) -> None:
        if not self.lent:
            return
        load, num_chunks, status = self.lent.pop(rng.randrange(len(self.lent))), 0, Status.OK
        while num_chunks < load.stop - load.start and status is Status.OK:
            content = _read(load, num_chunks)
            if content is None:
                status = Status.CORRUPT
            else:
                self.check_served(load.files[num_chunks].meta.key, content)
                num_chunks += 1
        self.store.complete_direct(load, num_chunks, status, used=rng.random() < 0.5)
        if status is not Status.OK:
            bad = load.files[num_chunks].meta.key
            assert bad not in set(self.store._cold.nvme.readable_keys())


lending = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@lending
@given(steps=HostMachine.steps())
def test_whatever_happens_to_a_lent_file_right_bytes_are_served_or_none(
    steps: list[tuple[str, int]],
) -> None:
    HostMachine().run(steps)
