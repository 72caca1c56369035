"""The replay against a live store: fed the same requests, both decide alike, chunk by chunk."""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootcellar.admission import choices
from rootcellar.admission.always import Always
from rootcellar.admission.base import (
    AdmissionPolicy,
    Answer,
    Boundary,
    Decision,
    EvictionOrder,
    Key,
    Offer,
    Tier,
)
from rootcellar.admission.base import Chain as ChainOfKeys
from rootcellar.admission.frequency_gate import FrequencyGate
from rootcellar.admission.learned.policy import Learned
from rootcellar.admission.lru import LruOrder
from rootcellar.bench.tune.lru import replay_lru
from rootcellar.bench.tune.replay import Outcome, Replay
from rootcellar.bench.tune.trace import Trace
from rootcellar.tiers.base import WriteDown
from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.io.base import Completion, IoBackend, Job, ReadJob
from rootcellar.tiers.loading import NO_ROOM
from rootcellar.tiers.nvme import NvmeTier
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import CHUNK_BYTES, FILE_BYTES, NAMESPACE, keys_of

Path_ = tuple[int, ...]

CONVERSATION = Path(__file__).parents[4] / "shared/traces/mooncake/conversation_first_half.jsonl"


@dataclass(frozen=True)
class Setup:
    policy: Callable[[], AdmissionPolicy]
    dram: int
    nvme: int
    write_down: WriteDown


class DoneTogether(IoBackend):
    """All reads are done at the next poll, and all else at the first while `holds` is False."""

    def __init__(self, io: IoBackend) -> None:
        self.max_in_flight = io.max_in_flight
        self.holds = True
        self._io = io
        self._under_way: dict[int, bool] = {}  # by job: whether it reads
        self._done: dict[int, Completion] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
        self._under_way |= {job.job_id: isinstance(job, ReadJob) for job in jobs}
        self._io.submit(jobs)

    def poll(self) -> list[Completion]:
        due = [job for job, reads in self._under_way.items() if reads or not self.holds]
        while not self._done.keys() >= set(due):
            self._io.wait(0.01)
            self._done |= {done.job_id: done for done in self._io.poll()}
        for job in due:
            del self._under_way[job]
        return [self._done.pop(job) for job in due]

    def wait(self, timeout_s: float) -> None:
        self._io.wait(timeout_s)

    @property
    def alive(self) -> bool:
        return self._io.alive

    @property
    def restarts(self) -> int:
        return self._io.restarts

    def close(self) -> None:
        self._io.close()


class LiveStore:
    """A TieredStore that ends a request only when all that it caused is done."""

    def __init__(self, root: Path, setup: Setup) -> None:
        self.store = TieredStore(
            StoreConfig(
                dram_bytes=setup.dram * CHUNK_BYTES,
                nvme_path=root / "store" if setup.nvme else None,
                nvme_bytes=setup.nvme * FILE_BYTES,
                io="threads",
                admission=setup.policy,
                write_down=setup.write_down,
            ),
            NAMESPACE,
        )
        nvme = self.store._cold.nvme
        self.io = None
        if isinstance(nvme, NvmeTier):
            self.io = nvme._io = nvme._ledger._io = DoneTogether(nvme._io)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.io is not None:
            self.io.holds = False
        self.store.close()

    def request(self, chain: list[bytes], now_s: float) -> tuple[int, int]:
        """Chunks served from (DRAM, NVMe)."""
        store = self.store
        with pytest.MonkeyPatch.context() as frozen:
            frozen.setattr(time, "monotonic", lambda: now_s)
            store.observe(chain)
        served = self._load_all(chain)
        store.complete_store(store.prepare_store(chain))
        while store.busy:
            self._end_a_round()
        store.check_integrity()
        return served.count(Tier.DRAM), served.count(Tier.NVME)

    def _load_all(self, chain: list[bytes]) -> list[Tier]:
        """The leading run, in several loads where there are not slots for all of it."""
        store, served = self.store, list[Tier]()
        while True:
            load = store.prepare_load(chain, len(served))
            store.wait_load(load)
            store.complete_load(load)
            served += load.tiers[: load.stop - load.start]
            if load.why_not != NO_ROOM or load.stop == load.start:
                return served

    def _end_a_round(self) -> None:
        """Decide all that can be decided while writes are under way, then let them end together."""
        cold, io = self.store._cold, self.io
        assert io is not None
        while cold.cleaner.due and not cold.flusher.backlog:
            self.store.poll()
        io.holds = False
        self.store.poll()
        io.holds = True

    def state(self) -> dict[str, object]:
        cold, metrics = self.store._cold, self.store._cold.metrics
        nvme = cold.nvme.stats() or {"bytes_written": 0}
        return {
            "dram": {chunk.key for chunk in cold.dram},
            "nvme": set(cold.nvme.readable_keys()),
            "chunk writes": metrics.admitted_chunks,
            "nvme chunk writes": nvme["bytes_written"] // FILE_BYTES,
            "promotions": metrics.promoted_chunks,
            "wasted promotions": metrics.wasted_promotions,
            "refusals": metrics.refusals,
        }


def state_of(replay: Replay) -> dict[str, object]:
    return {
        "dram": replay.dram.keys(),
        "nvme": replay.nvme.keys(),
        "chunk writes": replay.chunk_writes,
        "nvme chunk writes": replay.nvme_chunk_writes,
        "promotions": replay.promotions,
        "wasted promotions": replay.wasted_promotions,
        "refusals": replay.refusals,
    }


def compare(setup: Setup, requests: Sequence[Path_]) -> Replay:
    """Feed both; AssertionError at the first difference."""
    replay = Replay(setup.policy(), setup.dram, setup.nvme, write_down=setup.write_down)
    with tempfile.TemporaryDirectory() as root, LiveStore(Path(root), setup) as live:
        for now_s, path in enumerate(requests):
            chain = keys_of(path)
            served = live.request(chain, now_s)
            outcome = replay.request(chain, now_s)
            replay.check_integrity()
            assert (outcome.dram, outcome.nvme) == served
            assert state_of(replay) == live.state()
    return replay


class UsesOrder(LruOrder):
    """Of what was requested less often than `worth`, the least recently used goes."""

    def __init__(self, uses: Counter[Key]) -> None:
        super().__init__()
        self._uses = uses

    def victim(self, busy: Callable[[Key], bool], worth: float | None = None) -> Key | None:
        if worth is None:
            return super().victim(busy)
        return super().victim(lambda key: busy(key) or self._uses[key] >= worth)


class Uses(AdmissionPolicy):
    """A chunk is worth its requests so far, and to NVMe nothing when that is one."""

    def __init__(self) -> None:
        self._uses: Counter[Key] = Counter()

    def observe(self, chain: ChainOfKeys, now_s: float) -> None:
        self._uses.update(chain)

    def decide(self, offer: Offer) -> Decision:
        worth = [float(self._uses[key]) for key in offer.chain[offer.start :]]
        if offer.boundary is Boundary.ONTO_NVME and worth[-1] < 2:
            return Decision(Answer.REJECT, len(offer.chain), "one request")  # the stop says nothing
        return Decision(Answer.ADMIT, len(offer.chain), worth=worth)

    def order(self, tier: Tier) -> EvictionOrder:
        return UsesOrder(self._uses)


class Later(Uses):
    """What happened in the first requests is past: a policy that looks at the clock."""

    def observe(self, chain: ChainOfKeys, now_s: float) -> None:
        if now_s >= 3:
            super().observe(chain, now_s)


paths = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)
POLICIES: dict[str, Callable[[], AdmissionPolicy]] = {
    "always": Always,
    "gate": FrequencyGate,
    "short memory": partial(FrequencyGate, history_entries=9),
    "by uses": Uses,
    "by clock": Later,
    "learned": Learned,
}


@pytest.mark.parametrize("write_down", ["eager", "late"])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=12, deadline=None)
@given(
    dram=st.integers(1, 9),
    nvme=st.integers(0, 14),
    requests=st.lists(paths, min_size=1, max_size=40),
)
def test_the_replay_and_a_live_store_decide_alike(
    policy: str, write_down: WriteDown, dram: int, nvme: int, requests: list[Path_]
) -> None:
    compare(Setup(POLICIES[policy], dram, nvme, write_down), requests)


def test_both_wait_until_a_file_is_gone_before_they_write_it_again() -> None:
    """One request evicts a chunk from NVMe that is still in DRAM, and decides to write it."""
    compare(Setup(Always, 5, 2, "late"), [(0, 1, 1), (1, 1), (0, 0, 1), (1, 0)])


@pytest.mark.parametrize(
    ("policy", "write_down"),
    [(Always, "late"), (FrequencyGate, "eager"), (Learned, "late")],
)
def test_both_decide_alike_on_real_traffic(
    policy: Callable[[], AdmissionPolicy], write_down: WriteDown
) -> None:
    if not CONVERSATION.exists():
        pytest.skip("the Mooncake trace is not here")
    with CONVERSATION.open() as lines:
        requests = [tuple(json.loads(line)["hash_ids"][:16]) for line in islice(lines, 400)]
    replay = compare(Setup(policy, 32, 1000, write_down), requests)
    assert replay.nvme_chunk_writes > 0


def trace_of(requests: Sequence[Path_]) -> Trace:
    """Prefixes become numbers in order of first appearance."""
    numbers: dict[Path_, int] = {}
    chains = [
        [numbers.setdefault(path[: stop + 1], len(numbers)) for stop in range(len(path))]
        for path in requests
    ]
    lengths = [len(chain) for chain in chains]
    return Trace(
        name="made up",
        ids=np.array([chunk for chain in chains for chunk in chain], np.int32),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        times_s=np.arange(len(chains), dtype=np.float64),
        input_tokens=np.array(lengths, np.int64),
        output_tokens=np.zeros(len(chains), np.int64),
        chunk_tokens=1,
    )


@settings(deadline=None)
@given(dram=st.integers(1, 12), requests=st.lists(paths, min_size=1, max_size=40))
def test_admitting_everything_to_one_tier_is_the_exact_lru(
    dram: int, requests: list[Path_]
) -> None:
    exact = replay_lru(trace_of(requests), dram)
    replay = Replay(Always(), dram)
    found = [replay.request(keys_of(path), 0.0) for path in requests]
    assert [outcome.dram for outcome in found] == exact.hits.tolist()
    assert sum(outcome.plain for outcome in found) == exact.plain_hits
    assert replay.chunk_writes == exact.chunk_writes
    assert replay.nvme_chunk_writes == replay.promotions == 0


@settings(deadline=None)
@given(
    policy=st.sampled_from([*choices.POLICIES.values(), Uses]),
    write_down=st.sampled_from(["eager", "late"]),
    dram=st.integers(1, 9),
    nvme=st.integers(0, 14),
    requests=st.lists(paths, min_size=1, max_size=60),
)
def test_whatever_the_policy_the_tiers_stay_whole(
    policy: Callable[[], AdmissionPolicy],
    write_down: WriteDown,
    dram: int,
    nvme: int,
    requests: list[Path_],
) -> None:
    replay = Replay(policy(), dram, nvme, write_down=write_down)
    for now_s, path in enumerate(requests):
        chain = keys_of(path)
        before = replay.dram.keys() | replay.nvme.keys()
        outcome = replay.request(chain, now_s)
        replay.check_integrity()
        assert outcome.plain == len(before.intersection(chain))
        assert outcome.dram + outcome.nvme <= outcome.plain
        came = (replay.dram.keys() | replay.nvme.keys()) - before
        assert came <= set(chain), "a chunk came that nobody asked for"
    assert replay.wasted_promotions <= replay.promotions


def test_late_writes_what_would_be_evicted_next_and_eager_all_at_once() -> None:
    chains = [keys_of((0, 0)), keys_of((1, 1))]
    late, eager = Replay(Always(), 4, 9), Replay(Always(), 4, 9, write_down="eager")
    for chain in chains:
        late.request(chain, 0.0)
        eager.request(chain, 0.0)
    assert late.nvme.keys() == set(chains[0])
    assert eager.nvme.keys() == {*chains[0], *chains[1]}


def test_what_nvme_refuses_is_forgotten_when_dram_evicts_it() -> None:
    replay = Replay(Uses(), 2, 9)
    replay.request(keys_of((0, 0)), 0.0)
    assert replay.refusals == {f"{Boundary.ONTO_NVME}: one request": 2}
    replay.request(keys_of((1,)), 1.0)
    assert replay.dram.keys() == {*keys_of((0, 0))}, "worth as much as what is there"
    replay.request(keys_of((1,)), 2.0)
    assert replay.dram.keys() == {*keys_of((0,)), *keys_of((1,))}
    assert not replay.nvme.keys()


def test_a_run_longer_than_the_slots_that_are_free_is_served_as_far_as_they_go() -> None:
    replay = Replay(Always(), 3, 9, write_down="eager")
    chain = keys_of((0, 0, 0, 0, 0))
    assert replay.request(chain, 0.0) == Outcome(dram=0, nvme=0, plain=0)
    replay.request(keys_of((1,)), 1.0)
    assert replay.request(chain, 2.0) == Outcome(dram=2, nvme=1, plain=3)


def test_a_load_makes_room_with_nothing_of_its_own_run() -> None:
    replay = Replay(Always(), 3, 9, write_down="eager")
    chain = keys_of((0, 0, 0))
    replay.request(chain, 0.0)
    replay.request(keys_of((1,)), 1.0)
    assert replay.dram.keys() == {*chain[:2], *keys_of((1,))}
    assert replay.request(chain, 2.0) == Outcome(dram=2, nvme=1, plain=3)
    assert replay.dram.keys() == set(chain)
    assert (replay.promotions, replay.wasted_promotions) == (1, 0)
