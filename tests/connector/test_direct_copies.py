"""Chunk files read straight into rows on the device, by threads, change no reply and leak nothing.

The model computes on the CPU; the device that copies and verifies is a toy, which does so late.
"""

import logging
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from rootcellar.admission.always import Always
from rootcellar.admission.base import Answer, Boundary, Decision, Offer
from rootcellar.connector.dynamic_cache import model_layout
from rootcellar.connector.transformers import CachedModel
from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.gpu_direct import DirectLoads
from rootcellar.tiers.gpu_file import Choice, choose
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import chunk_files
from rootcellar.tiers.transfer import CopyJob, Transfer

from .test_copies import CHUNK, MIB, Bench, Interrupted, MakeModel, before_layer

MakeBench = Callable[..., "DirectBench"]


class NothingComesUp(Always):
    """Lets nothing that is on NVMe into DRAM."""

    num_up = 0

    def decide(self, offer: Offer) -> Decision:
        if offer.boundary is Boundary.NVME_TO_DRAM:
            stop = max(offer.start, min(len(offer.chain), self.num_up))
            answer = Answer.REJECT if stop == offer.start else Answer.ADMIT
            return Decision(answer, stop, "no further")
        return super().decide(offer)


class OneComesUp(NothingComesUp):
    num_up = 1


class ToyReader:
    """Of files on disk, by a thread of its own."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(1)
        self.errors: list[BaseException | None] = []
        """Of the next reads."""
        self.closed = False

    def read(self, path: str, target: torch.Tensor) -> Future[int]:
        error = self.errors.pop(0) if self.errors else None
        return self.threads.submit(self._read, path, target, error)

    def close(self) -> None:
        self.threads.shutdown()
        self.closed = True

    def _read(self, path: str, target: torch.Tensor, error: BaseException | None) -> int:
        if error:
            raise error
        content = np.fromfile(path, np.uint8)[: len(target)]
        target[: len(content)] = torch.from_numpy(content)
        return len(content)


class DirectBench(Bench):
    """One whose store has a reader, and lets nothing up into DRAM."""

    def __init__(self, model: PreTrainedModel, path: Path, choose: Callable[[int], int]) -> None:
        super().__init__(model, path, choose)
        self.admission = NothingComesUp
        self.path = path

    def choice(self, root: Path, place: torch.device, file_bytes: int) -> Choice:
        assert root == self.path
        self.reader = ToyReader()
        return Choice(self.reader, "it is a toy")

    def fill(self, prompt: torch.Tensor) -> CachedModel:
        """Open again, with the chunks of `prompt` on NVMe alone."""
        with self.open():
            self.check_reply(prompt)
        return self.open()

    def open(self) -> CachedModel:
        cached = super().open()
        self.toy.drain()  # of rows that nobody has used yet, none is in use
        return cached

    def spoil(self, which: int, how: int) -> None:
        files = chunk_files(self.path)
        path = files[which % len(files)]
        if how == 0:
            path.unlink()
        elif how == 1:
            os.truncate(path, path.stat().st_size // 2)
        else:
            content = bytearray(path.read_bytes())
            content[-100] ^= 4
            path.write_bytes(content)

    def keep_in_hbm(self, num_tokens: int) -> None:
        """Of the request before finish_copies(), which has left three tokens of its own."""
        tree = self.cached.tree
        self.cached.pool.free(tree.evict(len(tree) - num_tokens - 3))

    @property
    def nvme(self) -> dict[str, int]:
        stats: dict[str, int] = self.cached.store.stats()["nvme"]
        return stats

    @property
    def open_loads(self) -> int:
        return int(self.cached.store.stats()["open_loads"])


def _prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(6, 100, (1, length), generator=torch.Generator().manual_seed(seed))


def _lazy(below: int) -> int:
    """Does nothing that nobody waits for."""
    return 0


def _eager(below: int) -> int:
    """Prefers the stream that was made last."""
    return below - 1


@pytest.fixture(autouse=True)
def junk_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is read before it is written is not what it is to be, by chance."""
    monkeypatch.setattr(TieredStore, "observe_prefill", lambda store, tokens, seconds: None)
    monkeypatch.setattr("rootcellar.tiers.batches.LAYER_BYTES", 1)
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def make_bench(
    make_model: MakeModel,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> MakeBench:
    def make(choose: Callable[[int], int] = _lazy, **settings: Any) -> DirectBench:
        path = tmp_path_factory.mktemp("bench") / "store"
        bench = DirectBench(make_model(num_hidden_layers=3), path, choose)
        vars(bench).update(settings)
        monkeypatch.setattr("rootcellar.connector.transformers.device_of", bench.device_of)
        monkeypatch.setattr("rootcellar.connector.direct_copies.choose", bench.choice)
        return bench

    return make


# Which way chunks come


def test_what_dram_would_not_keep_comes_around_it(make_bench: MakeBench) -> None:
    bench, prompt = make_bench(), _prompt(3 * CHUNK + 50)
    with bench.fill(prompt) as cached:
        bench.check_reply(prompt)
        assert (bench.last.nvme, bench.last.computed) == (3 * CHUNK, 50)
        bench.check_accounts()
        stats = cached.store.stats()
        assert stats["nvme"]["direct_chunks"] == 3
        assert stats["hit_chunks"] == {"dram": 0, "nvme": 3}
        assert stats["hit_tokens"] == {"dram": 0, "nvme": 3 * CHUNK}
        assert stats["missed_chunks"] == 0
        assert stats["dram"]["slots_used"] == 0


def test_what_dram_would_keep_comes_through_it(make_bench: MakeBench) -> None:
    bench, prompt = make_bench(admission=Always), _prompt(3 * CHUNK + 50)
    with bench.fill(prompt):
        bench.check_reply(prompt)
        assert bench.last.nvme == 3 * CHUNK
        bench.check_accounts()
        assert bench.nvme["direct_chunks"] == 0
        bench.check_reply(prompt)
        assert bench.last.dram == 3 * CHUNK


def test_what_hbm_and_dram_have_comes_first(make_bench: MakeBench) -> None:
    bench, prompt = make_bench(admission=OneComesUp), _prompt(3 * CHUNK + 50)
    with bench.fill(prompt) as cached:
        bench.check_reply(prompt[:, : CHUNK + 1])
        bench.finish_copies()
        bench.keep_in_hbm(100)
        bench.check_reply(prompt)
        last = bench.last
        assert (last.hbm, last.dram, last.nvme) == (100, CHUNK - 100, 2 * CHUNK)
        assert bench.nvme["direct_chunks"] == 2
        bench.check_accounts()
        assert cached.store.stats()["missed_chunks"] == 0


def test_a_chunk_that_hbm_has_in_part_comes_for_the_rest(make_bench: MakeBench) -> None:
    bench, prompt = make_bench(), _prompt(3 * CHUNK + 50)
    with bench.fill(prompt):
        bench.check_reply(prompt)
        bench.finish_copies()
        bench.keep_in_hbm(300)
        bench.check_reply(prompt)
        assert (bench.last.hbm, bench.last.nvme) == (300, 3 * CHUNK - 300)
        bench.check_accounts()


def test_a_run_longer_than_the_rows_waits_for_them(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootcellar.connector.direct_copies._MOST_ROWS", 3)
    bench, prompt = make_bench(hbm_tokens=100), _prompt(7 * CHUNK + 5)
    bench.dram_chunks = 12
    with bench.fill(prompt) as cached:
        longer = torch.cat([prompt, _prompt(2 * CHUNK, seed=1)], dim=1)
        bench.check_reply(longer)
        assert bench.last.nvme == 7 * CHUNK
        assert bench.nvme["direct_chunks"] == 7
        bench.check_accounts()
        assert cached.store.stats()["missed_chunks"] == 2, "each counts once"


def test_of_a_run_that_ends_only_the_layers_are_waited_for(make_bench: MakeBench) -> None:
    bench, prompt = make_bench(), _prompt(2 * CHUNK + 50)
    copying = list[bool]()

    def note() -> None:
        copying.append(any(stream.queue for stream in bench.toy.streams))

    with bench.fill(prompt):
        longer = torch.cat([prompt, _prompt(CHUNK, seed=1)], dim=1)
        with before_layer(bench.model, 1, note):
            bench.check_reply(longer, max_new_tokens=1)
        assert bench.nvme["direct_chunks"] == 2
        assert copying == [False, True], "the first layer waited for all of them"
        bench.check_accounts()


def test_rows_are_lent_until_they_are_copied(make_bench: MakeBench) -> None:
    bench, prompt = make_bench(), _prompt(2 * CHUNK + 50)
    with bench.fill(prompt):
        with pytest.raises(Interrupted):  # before any layer was waited for
            bench.interrupt(prompt, Interrupted(), after=0)
        assert bench.open_loads == 1
        bench.check_reply(_prompt(20, seed=1))
        assert bench.open_loads == 1, "its copy is not done"
        bench.finish_copies()
        assert bench.open_loads == 0
        bench.check_accounts()


# What goes wrong


@pytest.mark.parametrize("how", range(3))
def test_a_chunk_whose_file_is_spoilt_is_computed(make_bench: MakeBench, how: int) -> None:
    bench, prompt = make_bench(), _prompt(3 * CHUNK + 50)
    with bench.fill(prompt[:, : CHUNK + 1]):
        first = set(chunk_files(bench.path))
    with bench.fill(prompt) as cached:
        second = next(i for i, path in enumerate(chunk_files(bench.path)) if path not in first)
        bench.spoil(second, how)
        bench.check_reply(prompt)
        served = bench.nvme["direct_chunks"]
        assert served in (1, 2), "either of the two that are not the first was spoilt"
        assert bench.last.nvme == served * CHUNK
        bench.check_accounts()
        assert bench.nvme["corrupt_chunks"] == 1
        assert cached.store.stats()["missed_chunks"] == 3 - served
        bench.check_reply(prompt)
        bench.check_accounts()
        assert bench.nvme["corrupt_chunks"] == 1, "never offered again"


def test_a_reader_that_fails_midway_is_asked_no_more(make_bench: MakeBench) -> None:
    bench, prompt = make_bench(), _prompt(3 * CHUNK + 50)
    with bench.fill(prompt):
        bench.reader.errors = [None, RuntimeError("no driver")]
        bench.check_reply(prompt)
        assert bench.last.nvme == CHUNK
        bench.check_accounts()
        bench.check_reply(prompt)
        assert bench.last.nvme == 3 * CHUNK, "through DRAM"
        assert bench.nvme["direct_chunks"] == 1
        assert bench.nvme["corrupt_chunks"] == 0
        bench.check_accounts()


def test_an_interrupt_while_files_are_read_gives_them_back(make_bench: MakeBench) -> None:
    bench, prompt = make_bench(), _prompt(3 * CHUNK + 50)
    with bench.fill(prompt):
        bench.reader.errors = [None, Interrupted()]
        with pytest.raises(Interrupted):
            bench.cached.generate(prompt, max_new_tokens=1, pad_token_id=0)
        assert bench.open_loads == 0
        assert bench.nvme["direct_chunks"] == 0
        bench.check_accounts()
        bench.check_reply(prompt)
        assert bench.last.nvme == 3 * CHUNK
        assert bench.nvme["direct_chunks"] == 3
        bench.check_accounts()


def test_a_device_that_refuses_launches_fails_no_request(make_bench: MakeBench) -> None:
    """Of the chunk in DRAM, of what verifies the others, or of their copies."""
    bench, prompt = make_bench(random.Random(0).randrange, admission=OneComesUp), _prompt(900)
    found = set[tuple[int, int]]()
    for launches in (0, 3, 6, 7, 8, 11, 14, 15):
        with bench.fill(prompt) as cached:
            bench.check_reply(prompt[:, : CHUNK + 1])
            bench.finish_copies()
            bench.wipe_hbm()
            bench.toy.launches_left = launches
            bench.check_reply(prompt)
            served = bench.last
            found.add((served.dram, served.nvme))
            bench.toy.launches_left = None
            bench.check_accounts()
            assert bench.nvme["direct_chunks"] * CHUNK == served.nvme
            assert cached.store.stats()["nvme"]["corrupt_chunks"] == 0
            bench.check_reply(prompt)
            bench.check_accounts()
    assert {(0, 0), (CHUNK, 0), (CHUNK, 2 * CHUNK)} <= found


def test_behind_chunks_that_did_not_arrive_nothing_is_copied(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, prompt = make_bench(admission=OneComesUp), _prompt(3 * CHUNK + 50)
    load, errors = Transfer.load, [RuntimeError("of the first alone")]

    def failing_once(*args: Any, **kwargs: Any) -> CopyJob:
        if errors:
            raise errors.pop()
        return load(*args, **kwargs)

    with bench.fill(prompt):
        bench.check_reply(prompt[:, : CHUNK + 1])
        bench.finish_copies()
        bench.wipe_hbm()
        monkeypatch.setattr(Transfer, "load", failing_once)
        bench.check_reply(prompt)
        assert not errors
        assert bench.last.computed == prompt.shape[1]
        bench.check_accounts()
        assert bench.nvme["direct_chunks"] == 0


def test_an_error_before_the_chunks_in_dram_are_copied_gives_files_back(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, prompt = make_bench(admission=OneComesUp), _prompt(3 * CHUNK + 50)

    def interrupted(*_: object) -> None:
        raise Interrupted

    with bench.fill(prompt):
        bench.check_reply(prompt[:, : CHUNK + 1])
        bench.finish_copies()
        bench.wipe_hbm()
        with monkeypatch.context() as patch:
            patch.setattr(TieredStore, "wait_load", interrupted)
            with pytest.raises(Interrupted):
                bench.cached.generate(prompt, max_new_tokens=1, pad_token_id=0)
        assert bench.open_loads == 0
        bench.check_reply(prompt)
        assert (bench.last.dram, bench.last.nvme) == (CHUNK, 2 * CHUNK)
        bench.check_accounts()


def test_what_is_invalidated_while_it_is_copied_is_not_served_again(make_bench: MakeBench) -> None:
    bench, prompt = make_bench(), _prompt(2 * CHUNK + 50)
    with bench.fill(prompt) as cached:
        with pytest.raises(Interrupted):
            bench.interrupt(prompt, Interrupted(), after=0)
        cached.store.invalidate()
        bench.check_reply(prompt)
        assert bench.last.computed == prompt.shape[1]
        bench.check_accounts()


# Closing


def test_files_go_back_after_the_copies_and_before_the_store_closes(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[str]()

    def noted(kind: Any) -> None:
        close = kind.close

        def noting(closed: Any, *args: Any) -> None:
            order.append(kind.__name__)
            close(closed, *args)

        monkeypatch.setattr(kind, "close", noting)

    bench, prompt = make_bench(), _prompt(2 * CHUNK + 50)
    cached = bench.fill(prompt)
    with pytest.raises(Interrupted):
        bench.interrupt(prompt, Interrupted(), after=0)
    for kind in (Transfer, DirectLoads, TieredStore):
        noted(kind)
    cached.close()
    assert order == ["Transfer", "DirectLoads", "TieredStore"]
    assert bench.reader.closed
    assert not any(stream.queue for stream in bench.toy.streams)
    assert bench.nvme["direct_chunks"] == 2
    cached.store.check_integrity()


def test_changed_weights_get_a_reader_of_their_own(make_bench: MakeBench) -> None:
    bench, prompt = make_bench(_eager), _prompt(2 * CHUNK + 50)
    weight = bench.model.get_parameter("model.layers.0.self_attn.k_proj.weight")
    with bench.fill(prompt):
        before = bench.reader
        with pytest.raises(Interrupted):
            bench.interrupt(prompt, Interrupted(), after=0)
        weight.data.mul_(2.0)
        bench.check_reply(prompt)
        assert bench.last.computed == prompt.shape[1]
        assert before.closed
        weight.data.div_(2.0)
        bench.check_reply(prompt)
        assert bench.last.nvme == 2 * CHUNK
        assert bench.nvme["direct_chunks"] == 2
        bench.check_accounts()


# Opening


def _config(bench: DirectBench, **changes: Any) -> StoreConfig:
    arguments: dict[str, Any] = {
        "nvme_path": bench.path,
        "nvme_bytes": 8 * MIB,
        "io": "threads",
    } | changes
    return StoreConfig(dram_bytes=model_layout(bench.model).chunk_bytes, **arguments)


@pytest.mark.parametrize("changes", [{"nvme_path": None, "nvme_bytes": 0}, {"codec": "zstd"}])
def test_nothing_is_measured_where_no_file_could_be_read_so(
    make_bench: MakeBench, changes: dict[str, Any]
) -> None:
    bench = make_bench()
    with CachedModel(bench.model, _config(bench, **changes), hbm_tokens=8):
        assert not hasattr(bench, "reader")


def test_why_it_is_used_or_not_is_logged(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rootcellar.connector.direct_copies")
    bench = make_bench()
    bench.open().close()
    assert caplog.messages[-1].endswith("GPU memory is used: it is a toy")
    monkeypatch.setattr("rootcellar.connector.direct_copies.choose", choose)
    bench.open().close()
    assert caplog.messages[-1].endswith("GPU memory is not used: the KV cache is on cpu")


def test_a_device_with_no_memory_left_for_rows_opens_without(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("of the GPU")

    monkeypatch.setattr("rootcellar.connector.direct_copies.DirectLoads", refuse)
    bench, prompt = make_bench(), _prompt(2 * CHUNK + 50)
    with bench.fill(prompt):
        assert bench.reader.closed
        bench.check_reply(prompt)
        assert bench.last.nvme == 2 * CHUNK
        bench.check_accounts()


@pytest.mark.parametrize(("most_bytes", "num_rows"), [(1, 1), (3 * 200_704, 3), (1 << 30, 8)])
def test_rows_are_as_many_as_a_bounded_number_of_bytes_holds(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, most_bytes: int, num_rows: int
) -> None:
    monkeypatch.setattr("rootcellar.connector.direct_copies._ROWS_BYTES", most_bytes)
    with make_bench().open() as cached:
        direct = cached._copies._direct
        assert direct is not None
        assert len(direct._rows) == num_rows


# At any time, among everything else

STEPS = ("ask", "ask", "ask", "wipe", "reopen", "spoil", "break", "refuse", "interrupt", "forget")


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 1 << 16)), max_size=14),
    num_up=st.sampled_from([NothingComesUp, OneComesUp, Always]),
    rows=st.integers(1, 4),
)
def test_whatever_happens_replies_stay_the_same(
    make_bench: MakeBench,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[tuple[str, int]],
    num_up: type[Always],
    rows: int,
) -> None:
    monkeypatch.setattr("rootcellar.connector.direct_copies._MOST_ROWS", rows)
    bench = make_bench(random.Random(len(steps)).randrange, admission=num_up)
    bench.fill(_prompt(5 * CHUNK + 5))
    for step, seed in steps:
        rng = random.Random(seed)
        head = _prompt(5 * CHUNK + 5)[:, : rng.randrange(1, 5 * CHUNK)]
        prompt = torch.cat([head, _prompt(rng.randrange(1, 300), seed)], dim=1)
        match step:
            case "ask":
                bench.check_reply(prompt)
            case "wipe":
                bench.wipe_hbm()
            case "reopen":
                bench.cached.close()
                bench.open()
            case "spoil":
                if chunk_files(bench.path):
                    bench.spoil(seed, rng.randrange(3))
            case "break":
                bench.reader.errors = [*[None] * rng.randrange(3), RuntimeError("no driver")]
            case "refuse":
                bench.toy.launches_left = rng.randrange(12)
                bench.check_reply(prompt)
                bench.toy.launches_left = None
            case "interrupt":
                with pytest.raises(Interrupted):
                    bench.interrupt(prompt, Interrupted(), after=0)
            case "forget":
                bench.cached.store.invalidate()
    bench.check_accounts()
    bench.cached.close()
    assert bench.reader.closed
