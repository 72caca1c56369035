"""Real kills: the process that owns a store, or its IO worker, dies between any two steps."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rootcellar.tiers.config import IoKind
from rootcellar.tiers.killable import NVME_CHUNKS, KillableStore
from rootcellar.tiers.toy import CHUNK_BYTES, FILE_BYTES, bytes_on_disk, content_of, keys_of

Chain = tuple[int, ...]


@contextmanager
def _child(root: Path, io: IoKind) -> Iterator[KillableStore]:
    child = KillableStore(root, io)
    try:
        yield child
    finally:
        child.kill()


def _check(served: list[bytes], chain: Chain, offered: set[bytes]) -> None:
    for index, content in enumerate(served):
        assert content == content_of(chain[: index + 1], CHUNK_BYTES), "wrong bytes"
        assert keys_of(chain)[index] in offered, "served what was invalidated or never stored"


def _random_chain(rng: random.Random) -> Chain:
    return tuple(rng.randrange(3) for _ in range(rng.randint(1, 4)))


VERBS = ("put", "offer", "start a load", "get", "get", "flush", "invalidate", "kill", "kill worker")


@pytest.mark.parametrize("io", ["threads", "process"])
@pytest.mark.parametrize("seed", range(4))
def test_killed_between_any_two_steps_it_serves_only_right_bytes(
    tmp_path: Path, io: IoKind, seed: int
) -> None:
    rng, root, offered = random.Random(seed), tmp_path / "store", set[bytes]()
    with _child(root, io) as child:
        for _ in range(40):
            verb, chain = rng.choice(VERBS), _random_chain(rng)
            if verb == "kill":
                child.kill()
                child.start()
            elif verb == "kill worker":
                child.kill_worker()
            elif verb == "get":
                _check(child.ask("get", chain), chain, offered)
            elif verb == "invalidate":
                child.ask("invalidate")
                offered.clear()
            else:
                if verb in ("put", "offer"):
                    offered.update(keys_of(chain))
                child.ask(verb, chain)
            assert bytes_on_disk(root) <= NVME_CHUNKS * FILE_BYTES
            if rng.random() < 0.5:  # else the next step meets what is still under way
                _check_account(child)
        _check_account(child)


def _check_account(child: KillableStore) -> None:
    assert child.ask("flush")
    assert child.ask("stats")["nvme"]["used_bytes"] == bytes_on_disk(child.root)


@pytest.mark.parametrize("io", ["threads", "process"])
def test_what_was_flushed_survives_a_kill(tmp_path: Path, io: IoKind) -> None:
    with _child(tmp_path / "store", io) as child:
        child.ask("put", (1, 2, 3))
        child.ask("flush")
        child.kill()
        child.start()
        served = child.ask("get", (1, 2, 3))
        assert len(served) == 3
        _check(served, (1, 2, 3), set(keys_of((1, 2, 3))))


def test_the_store_goes_on_and_comes_back_when_the_worker_dies(tmp_path: Path) -> None:
    with _child(tmp_path / "store", "process") as child:
        child.ask("put", (1, 2, 3))
        child.ask("flush")
        for death in range(1, 4):
            child.kill_worker()
            child.ask("start a load", (1, 2, 3))
            child.ask("put", (death + 3,))
            while not child.ask("stats")["nvme"]["io_alive"]:
                child.ask("flush")
            assert child.ask("flush")
            assert len(child.ask("get", (1, 2, 3))) == 3
            assert child.ask("stats")["nvme"]["io_restarts"] == death
        assert bytes_on_disk(child.root) == child.ask("stats")["nvme"]["used_bytes"]
