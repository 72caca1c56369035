"""Which reads a queue of requests gets, and for how long it waits for them."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, make_offload_key

from rootcellar import KVLayout, Namespace, StoreConfig, TieredStore
from rootcellar.connector.vllm.lookups import Lookups
from rootcellar.connector.vllm.names import ChunkNames
from rootcellar.connector.vllm.requests import RequestState
from rootcellar.connector.vllm.shape import Group, Shape

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
TOKENS = 16
LAYOUT = KVLayout(
    num_layers=1, kv_factor=1, num_kv_heads=1, head_dim=256, dtype="uint8", chunk_tokens=TOKENS
)
NAMESPACE = Namespace(model="toy", revision="1", layout=LAYOUT)
NAMES = ChunkNames(NAMESPACE.digest)
LENGTH = 4
SLOTS = 16
WAITS = [RETRY] + [MISS] * (LENGTH - 1)
"""What makes vLLM ask for a request again: one chunk to wait for, and no more to look up."""


def request(number: int, shared: int = 0, length: int = LENGTH) -> RequestState:
    """Its first `shared` chunks are those of every other request with as many."""
    names = [f"{'all' if index < shared else number} {index}" for index in range(length)]
    state = RequestState(NAMES, [hashlib.sha256(name.encode()).digest() for name in names])
    state.extend(0, 1)
    return state


def keys_of(state: RequestState) -> list[OffloadKey]:
    return [make_offload_key(block_hash, 0) for block_hash in state.block_hashes]


def answers(lookups: Lookups, state: RequestState) -> list[LookupResult]:
    lookups.ask(state, 0)
    return [lookups.common or lookups.answer(key) for key in keys_of(state)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store on disk with the chunks of 40 requests."""
    with TieredStore(config(tmp_path / "store"), NAMESPACE) as store:
        for number in range(40):
            chain = request(number).chain
            chunk = torch.full(LAYOUT.shape(TOKENS), number, dtype=torch.uint8)
            assert store.put(chain, [chunk] * LENGTH) == LENGTH
        assert store.flush()
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[TieredStore]:
    with TieredStore(config(root), NAMESPACE) as opened:
        yield opened


def config(root: Path) -> StoreConfig:
    return StoreConfig(
        dram_bytes=SLOTS * 4096, nvme_path=root, nvme_bytes="16MiB", io="threads", load_timeout_s=30
    )


def lookups_of(store: TieredStore, hbm_chunks: int = 1000, timeout_s: float = 30) -> Lookups:
    shape = Shape((Group(0, TOKENS, full_attention=True),), 1, TOKENS, hbm_chunks)
    return Lookups(store, shape, timeout_s)


def pinned(store: TieredStore) -> int:
    count: int = store.stats()["dram"]["slots_pinned"]
    return count


def test_a_queue_of_requests_leaves_half_of_dram_to_stores(store: TieredStore) -> None:
    lookups, queue = lookups_of(store), [request(number) for number in range(40)]
    for state in queue:
        assert answers(lookups, state) == WAITS
        assert pinned(store) <= SLOTS // 2
    assert store.flush()
    assert [answers(lookups, state)[0] for state in queue] == [HIT, HIT] + [RETRY] * 38
    for state in queue:
        lookups.release(state)
    assert pinned(store) == 0


def test_no_more_is_read_ahead_than_hbm_could_take(store: TieredStore) -> None:
    lookups, queue = lookups_of(store, hbm_chunks=LENGTH), [request(1), request(2)]
    for state in queue:
        assert answers(lookups, state) == WAITS
    assert store.flush()
    assert [answers(lookups, state) for state in queue] == [[HIT] * LENGTH, WAITS]
    lookups.take(queue[0], range(LENGTH), [])
    assert answers(lookups, queue[1]) == WAITS
    assert store.flush()
    assert answers(lookups, queue[1]) == [HIT] * LENGTH


def test_who_gets_no_turn_in_time_recomputes(store: TieredStore) -> None:
    lookups, queue = lookups_of(store, hbm_chunks=1, timeout_s=1e-6), [request(1), request(2)]
    assert answers(lookups, queue[0]) == WAITS
    assert answers(lookups, queue[1]) == WAITS
    assert answers(lookups, queue[1]) == [MISS] * LENGTH
    assert lookups.missed_chunks == LENGTH
    queue[1].ask_afresh()
    assert answers(lookups, queue[1]) == WAITS


def test_requests_with_one_prefix_share_its_read_and_wait_for_no_more(root: Path) -> None:
    with TieredStore(config(root), NAMESPACE) as store:
        long, short = request(3), request(3, length=2)
        lookups = lookups_of(store)
        assert answers(lookups, long) == WAITS
        before = store.stats()["nvme"]["jobs_in_flight"]
        assert before == LENGTH
        assert answers(lookups, short)[0] in (RETRY, HIT)
        assert store.stats()["nvme"]["jobs_in_flight"] <= before, "a chunk is read twice"
        assert store.flush()
        assert answers(lookups, short) == [HIT] * 2


def test_a_read_that_finds_a_chunk_damaged_ends_the_hit_before_it(root: Path) -> None:
    state = request(5)
    damaged = next(root.glob(f"chunks/*/*/{state.chain[2].hex()}.kv"))
    damaged.write_bytes(damaged.read_bytes()[:-4096] + bytes(4096)[:-1] + b"x")
    with TieredStore(config(root), NAMESPACE) as store:
        lookups = lookups_of(store)
        assert answers(lookups, state) == WAITS
        assert store.flush()
        assert answers(lookups, state) == [HIT, HIT, MISS, MISS]
        load = lookups.take(state, range(2), [])[0]
        assert {tier.value for tier in load.tiers} == {"nvme"}
        store.complete_load(load)
        assert answers(lookups, state) == [HIT, HIT, MISS, MISS]
        assert store.stats()["nvme"]["corrupt_chunks"] == 1
        lookups.release(state)


def test_when_hbm_lost_what_it_had_the_rest_is_looked_up_again(store: TieredStore) -> None:
    lookups, state = lookups_of(store), request(7)
    lookups.ask(state, 2)
    assert store.flush()
    lookups.ask(state, 2)
    assert lookups.num_hits == 2
    assert answers(lookups, state) == WAITS
    assert store.flush()
    assert answers(lookups, state) == [HIT] * LENGTH
    lookups.release(state)
    assert pinned(store) == 0


def test_misses_are_counted_once_however_often_a_request_is_asked_for(store: TieredStore) -> None:
    lookups, state = lookups_of(store), request(99)
    for _ in range(3):
        assert answers(lookups, state) == [MISS] * LENGTH
    assert lookups.missed_chunks == LENGTH


def test_who_gave_up_still_gets_what_is_in_dram_and_may_wait_again_later(
    store: TieredStore,
) -> None:
    lookups, state, other = lookups_of(store, hbm_chunks=1, timeout_s=1e-6), request(8), request(9)
    store.get(state.chain.head(2))  # promoted
    assert answers(lookups, other)[0] is RETRY  # has the one turn there is
    assert answers(lookups, state) == WAITS
    assert answers(lookups, state) == [HIT, HIT, MISS, MISS]
    load = lookups.take(state, range(2), [])[0]
    store.complete_load(load)
    lookups.release(other)
    lookups.ask(state, 2)
    assert lookups.answer(keys_of(state)[2]) is RETRY
    lookups.release(state)


def test_each_chunk_of_a_load_has_the_tier_it_came_from(store: TieredStore) -> None:
    lookups, state = lookups_of(store), request(8)
    store.get(state.chain.head(2))
    assert answers(lookups, state) == WAITS
    assert store.flush()
    store.complete_load(lookups.take(state, range(LENGTH), [])[0])
    tiers = [lookups.source(key) for key in state.chain]
    assert [None if tier is None else tier.value for tier in tiers] == ["dram"] * 2 + ["nvme"] * 2
    assert lookups.source(b"other") is None


def test_when_hbm_has_more_than_was_read_ahead_the_rest_is_looked_up_anew(
    store: TieredStore,
) -> None:
    lookups, state = lookups_of(store, hbm_chunks=2), request(6)
    assert answers(lookups, state) == WAITS
    assert store.flush()
    lookups.ask(state, 3)
    assert pinned(store) == 1
    assert lookups.answer(keys_of(state)[3]) is RETRY
    assert store.flush()
    lookups.ask(state, 3)
    assert lookups.num_hits == 1
    lookups.release(state)
    assert pinned(store) == 0


def test_a_load_that_the_reads_ahead_do_not_cover_leaves_none_of_them_pinned(
    store: TieredStore,
) -> None:
    lookups, state = lookups_of(store), request(6)
    store.get(state.chain)
    store.get(request(7).chain)  # request 7 is in DRAM, too, and 6 was promoted before it
    lookups.ask(state, 2)
    for key in state.chain:
        assert store.lookup([key]).num_chunks == 1
    loads = lookups.take(state, range(LENGTH), [])
    assert [chunk.key for chunk in loads[0].chunks] == list(state.chain)
    store.complete_load(loads[0])
    assert pinned(store) == 0
    assert lookups.source(state.chain[0]) is not None


def test_after_a_reset_no_answer_of_before_holds(store: TieredStore) -> None:
    lookups, state = lookups_of(store), request(5)
    store.get(state.chain)
    assert answers(lookups, state) == [HIT] * LENGTH
    lookups.forget()
    store.invalidate()
    assert (lookups.common or lookups.answer(keys_of(state)[0])) is MISS


def test_a_queue_that_waits_for_its_turn_is_not_looked_up_at_every_step(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups, queue = lookups_of(store, hbm_chunks=1), [request(number) for number in range(30)]
    for state in queue:
        assert answers(lookups, state) == WAITS
    looked_up: list[object] = []
    monkeypatch.setattr(store, "lookup", looked_up.append)
    for state in queue:
        assert answers(lookups, state) == WAITS
    assert not looked_up
    monkeypatch.undo()
    for state in queue:
        lookups.release(state)
