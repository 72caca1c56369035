"""The store against a naive model: every byte served is checked, and so is every account, and what
an observer knows of it."""

import hashlib
import random
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rootcellar.admission.always import Always
from rootcellar.admission.base import AdmissionPolicy
from rootcellar.tiers.base import Load, LoadState, StoreJob, Tier, WriteDown
from rootcellar.tiers.config import CodecName, StoreConfig
from rootcellar.tiers.dram import ChunkState
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import (
    CHUNK_BYTES,
    FILE_BYTES,
    NAMESPACE,
    bytes_of,
    bytes_on_disk,
    chunk_files,
    chunks_of,
    content_of,
    keys_of,
    tensor_of,
)
from rootcellar.tiers.toy_policy import Choosy

Chain = tuple[int, ...]
chains = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
seeds = st.integers(0, 1 << 16)

DRAM_CHUNKS, NVME_CHUNKS = 5, 8
BESIDE = 9


def beside(key: bytes) -> bytes:
    """The key of a chunk that hangs beside this one."""
    return hashlib.sha256(key).digest()


def path_of(chain: Chain, key: bytes) -> Chain:
    """Of the chunk with this key, of the chain or beside it."""
    for end, own in enumerate(keys_of(chain), 1):
        if key in (own, beside(own)):
            return chain[:end] if key == own else (*chain[:end], BESIDE)
    raise AssertionError("no key of this chain")


class StoreMachine(RuleBasedStateMachine):
    """One store in this process; the disk is spoilt, filled and looked at behind its back."""

    codec: CodecName = "raw"
    write_down: WriteDown = "late"
    policy: type[AdmissionPolicy] = Always

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.root = self.folder / "store"
        self.offered: set[bytes] = set()  # since the last invalidation
        self.loads: list[tuple[Load, Chain]] = []
        self.jobs: list[tuple[StoreJob, Chain]] = []
        self.seen: set[tuple[Tier, bytes]] = set()  # what an observer thinks is here
        self.store = self.open()

    def open(self) -> TieredStore:
        config = StoreConfig(
            dram_bytes=DRAM_CHUNKS * CHUNK_BYTES,
            nvme_path=self.root,
            nvme_bytes=NVME_CHUNKS * FILE_BYTES,
            io="threads",
            io_lanes=2,
            codec=self.codec,
            write_down=self.write_down,
            admission=self.policy,
            load_timeout_s=0.2,
        )
        store = TieredStore(config, NAMESPACE)
        store.record_events()
        self.seen.clear()
        return store

    @rule(chain=chains)
    def put(self, chain: Chain) -> None:
        self.offered.update(keys_of(chain))
        admitted = self.store.put(keys_of(chain), chunks_of(chain))
        assert 0 <= admitted <= len(chain)
        refused = self.policy is not Always
        assert admitted == len(chain) or self.loads or self.jobs or refused

    @rule(chain=chains)
    def get(self, chain: Chain) -> None:
        self.check_served(keys_of(chain), chain, self.store.get(keys_of(chain)))

    @rule(chain=chains)
    def get_what_hangs_beside(self, chain: Chain) -> None:
        key = beside(keys_of(chain)[-1])
        self.check_served([key], chain, self.store.get([key]))

    @rule(chain=chains)
    def lookup(self, chain: Chain) -> None:
        found = self.store.lookup(keys_of(chain))
        assert set(keys_of(chain)[: found.num_chunks]) <= self.offered
        assert (found.why_not == "") == (found.num_chunks == len(chain))

    @rule(chain=chains, start=st.integers(0, 3))
    def prepare_load(self, chain: Chain, start: int) -> None:
        load = self.store.prepare_load(keys_of(chain), min(start, len(chain)))
        self.loads.append((load, chain))

    @rule(chain=chains)
    def prepare_load_of_what_hangs_beside(self, chain: Chain) -> None:
        self.loads.append((self.store.prepare_load([beside(keys_of(chain)[-1])]), chain))

    @precondition(lambda self: self.loads)
    @rule(seed=seeds)
    def complete_load(self, seed: int) -> None:
        load, chain = self.loads.pop(random.Random(seed).randrange(len(self.loads)))
        if load.state is LoadState.READY:
            self.check_served(load.keys[load.start :], chain, self.store.load_views(load))
        self.store.complete_load(load)

    @rule(chain=chains)
    def prepare_store(self, chain: Chain) -> None:
        self.jobs.append((self.store.prepare_store(keys_of(chain)), chain))

    @rule(chain=chains, start=st.integers(0, 3))
    def prepare_beside(self, chain: Chain, start: int) -> None:
        anchors = keys_of(chain)[start:]
        self.jobs.append((self.store.prepare_beside(anchors, list(map(beside, anchors))), chain))

    @precondition(lambda self: self.jobs)
    @rule(seed=seeds, success=st.booleans())
    def complete_store(self, seed: int, success: bool) -> None:
        job, chain = self.jobs.pop(random.Random(seed).randrange(len(self.jobs)))
        for index, view in zip(job.wanted, self.store.store_views(job), strict=True):
            view.copy_(tensor_of(path_of(chain, job.keys[index])))
            if success:
                self.offered.add(job.keys[index])
        self.store.complete_store(job, success)

    @rule()
    def poll(self) -> None:
        self.store.poll()

    @rule()
    def flush(self) -> None:
        assert self.store.flush()
        self.check_account()
        self.check_everything_was_decided()

    @rule()
    def invalidate(self) -> None:
        self.store.invalidate()
        self.offered.clear()
        self.jobs, jobs = [], self.jobs
        for job, _ in jobs:  # what was under way is never served
            self.store.complete_store(job)

    @rule()
    def restart(self) -> None:
        for load, _ in self.loads:
            self.store.complete_load(load)
        for job, _ in self.jobs:
            self.store.complete_store(job, success=False)
        self.loads, self.jobs = [], []
        self.store.close()
        assert bytes_on_disk(self.root) <= NVME_CHUNKS * FILE_BYTES
        self.store = self.open()
        self.check_account()

    @rule(seed=seeds)
    def spoil_a_file(self, seed: int) -> None:
        assert self.store.flush()  # no file is being written or removed
        rng, files = random.Random(seed), chunk_files(self.root)
        if files:
            path = rng.choice(files)
            content = bytearray(path.read_bytes())
            if content:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)

    @invariant()
    def accounts_hold(self) -> None:
        self.store.check_integrity()
        nvme = self.store.stats()["nvme"]
        assert nvme["used_bytes"] <= NVME_CHUNKS * FILE_BYTES
        if nvme["jobs_in_flight"] == 0:
            assert nvme["used_bytes"] == bytes_on_disk(self.root)

    @invariant()
    def an_observer_knows_exactly_what_is_here(self) -> None:
        for event in self.store.take_events():
            place = event.tier, event.key
            assert (place in self.seen) != event.stored, "told twice in a row"
            (self.seen.add if event.stored else self.seen.remove)(place)
        cold = self.store._cold
        assert {key for tier, key in self.seen if tier is Tier.NVME} == {*cold.nvme.readable_keys()}
        in_dram = {chunk.key for chunk in cold.dram if chunk.readable and not chunk.staged}
        assert {key for tier, key in self.seen if tier is Tier.DRAM} == in_dram

    def check_served(self, keys: Iterable[bytes], chain: Chain, served: list[torch.Tensor]) -> None:
        for key, tensor in zip(keys, served, strict=False):
            assert bytes_of(tensor) == content_of(path_of(chain, key), CHUNK_BYTES), "wrong bytes"
            assert key in self.offered, "served what was never stored"

    def check_everything_was_decided(self) -> None:
        """Save what hangs from a chunk that is still being filled, or lost its place on NVMe
        meanwhile."""
        dram = self.store._cold.dram
        if self.store.stats()["nvme"]["free_bytes"] < FILE_BYTES:
            return
        waiting = {chunk.key for chunk in dram if chunk.state is ChunkState.WRITING}
        for chunk in [*dram] * 2:  # a chunk may come before what it hangs from
            if chunk.parent in waiting:
                waiting.add(chunk.key)
        assert all(c.key in waiting for c in dram if c.state is ChunkState.UNDECIDED)
        if self.policy is Always:
            assert all(c.key in waiting for c in dram if c.state is ChunkState.UNBACKED)

    def check_account(self) -> None:
        assert self.store.flush()
        assert self.store.stats()["nvme"]["used_bytes"] == bytes_on_disk(self.root)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


class EagerStoreMachine(StoreMachine):
    write_down = "eager"


class ChoosyStoreMachine(StoreMachine):
    policy = Choosy


class EagerChoosyStoreMachine(EagerStoreMachine):
    policy = Choosy


class CompressedStoreMachine(StoreMachine):
    codec = "zstd"


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=70,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestEagerStore = EagerStoreMachine.TestCase
TestEagerStore.settings = settings(TestStore.settings, max_examples=50)
TestChoosyStore = ChoosyStoreMachine.TestCase
TestChoosyStore.settings = settings(TestStore.settings, max_examples=60)
TestEagerChoosyStore = EagerChoosyStoreMachine.TestCase
TestEagerChoosyStore.settings = settings(TestStore.settings, max_examples=30)
TestCompressedStore = CompressedStoreMachine.TestCase
TestCompressedStore.settings = settings(TestStore.settings, max_examples=15)
