"""Copies beside the engine, in any order a device may do them in, change no reply and leak nothing.

The model computes on the CPU; the device that copies is a toy, whose copies come late.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from rootcellar.admission.always import Always
from rootcellar.connector.dynamic_cache import model_layout
from rootcellar.connector.served import Served
from rootcellar.connector.transformers import CachedModel
from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy_device import ToyDevice
from rootcellar.tiers.transfer import Transfer

MakeModel = Callable[..., PreTrainedModel]

CHUNK = 256
MIB = 1 << 20


class Interrupted(BaseException):
    """Like KeyboardInterrupt, no Exception."""


class Failing(BaseStreamer):
    """Raises when it gets its token number `after`; the prompt counts as one."""

    def __init__(self, error: BaseException, after: int) -> None:
        self._error = error
        self._left = after

    def put(self, value: torch.Tensor) -> None:
        self._left -= 1
        if self._left < 0:
            raise self._error

    def end(self) -> None: ...


@contextmanager
def before_layer(model: PreTrainedModel, index: int, note: Callable[[], None]) -> Iterator[None]:
    """Not by a hook, which would make another model of it."""
    layer: Any = model.get_submodule(f"model.layers.{index}")
    forward = layer.forward

    def noted(*given: Any, **named: Any) -> Any:
        note()
        return forward(*given, **named)

    layer.forward = noted
    try:
        yield
    finally:
        del layer.forward


class Bench:
    """A model, the replies it gives by itself, and a cached one whose device is a toy."""

    def __init__(self, model: PreTrainedModel, path: Path, choose: Callable[[int], int]) -> None:
        self.model = model
        self.dram_chunks = 5
        self.hbm_tokens = 700
        self.admission: type[Always] = Always
        self._path = path
        self._choose = choose

    def device_of(self, tensors: object) -> ToyDevice:
        self.toy = ToyDevice(self._choose, compute="caller")
        return self.toy

    def open(self) -> CachedModel:
        config = StoreConfig(
            dram_bytes=self.dram_chunks * model_layout(self.model).chunk_bytes,
            nvme_path=self._path,
            nvme_bytes=64 * MIB,
            io="threads",
            admission=self.admission,
            load_timeout_s=60.0,
        )
        self.cached = CachedModel(self.model, config, hbm_tokens=self.hbm_tokens)
        return self.cached

    def check_reply(self, prompt: torch.Tensor, salt: str | None = None, **arguments: Any) -> Any:
        arguments = {"max_new_tokens": 3, "pad_token_id": 0} | arguments
        expected = self.model.generate(prompt, **arguments)  # type: ignore[operator]
        output = self.cached.generate(prompt, salt=salt, **arguments)
        tokens = output if isinstance(output, torch.Tensor) else output.sequences
        said = expected if isinstance(expected, torch.Tensor) else expected.sequences
        assert torch.equal(tokens, said)
        return output

    def interrupt(self, prompt: torch.Tensor, error: BaseException, after: int) -> None:
        streamer = Failing(error, after)
        self.cached.generate(prompt, max_new_tokens=3, pad_token_id=0, streamer=streamer)

    def finish_copies(self) -> None:
        """The device gets time, and a request that holds no chunk finds what it has done."""
        self.toy.drain()
        self.cached.generate(_prompt(2, seed=999), max_new_tokens=2, pad_token_id=0)

    def wipe_hbm(self) -> None:
        self.cached.pool.free(self.cached.tree.evict(len(self.cached.tree)))

    @property
    def last(self) -> Served:
        assert self.cached.last is not None
        return self.cached.last

    def check_accounts(self) -> None:
        """Once copies are done every slot is free or in the tree, and nothing is lent or pinned."""
        self.finish_copies()
        cached = self.cached
        cached.tree.check_integrity()
        cached.pool.check_integrity()
        assert cached.pool.num_free + len(cached.tree) == cached.pool.num_tokens
        assert cached.store.stats()["open_loads"] == 0
        cached.store.check_integrity()
        held = len(cached.tree)
        freed = cached.tree.evict(held)
        assert len(freed) == held, "something is still pinned"
        cached.pool.free(freed)


def _prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(6, 100, (1, length), generator=torch.Generator().manual_seed(seed))


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
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Bench]:
    def make(choose: Callable[[int], int], **settings: Any) -> Bench:
        bench = Bench(make_model(num_hidden_layers=3), tmp_path / "store", choose)
        vars(bench).update(settings)
        monkeypatch.setattr("rootcellar.connector.transformers.device_of", bench.device_of)
        return bench

    return make


def _lazy(below: int) -> int:
    """Does nothing that nobody waits for."""
    return 0


@pytest.mark.parametrize("seed", range(6))
def test_requests_of_any_kind_in_any_order_get_the_same_replies(
    make_bench: Callable[..., Bench], seed: int
) -> None:
    rng = random.Random(seed)
    bench = make_bench(rng.randrange)
    said = [_prompt(200)] * 3
    sources = set[str]()
    bench.open()
    for turn in range(16):
        who = rng.randrange(3)
        prompt = torch.cat([said[who], _prompt(rng.randrange(1, 300), seed=turn)], dim=1)
        salt = rng.choice([None, None, None, "other"])
        match rng.randrange(8):
            case 0:  # the caller gets the cache, and writes to it
                output = bench.check_reply(prompt, salt, return_dict_in_generate=True)
                for layer in output.cache.layers:
                    layer.keys.zero_()
                said[who] = output.sequences
            case 1:
                error = rng.choice([Interrupted(), StopIteration(), RuntimeError("of the model")])
                with pytest.raises(type(error)):
                    bench.interrupt(prompt, error, after=rng.randrange(3))
            case 2:
                said[who] = bench.check_reply(prompt, salt, prefill_chunk_size=64)
            case 3:
                bench.cached.close()
                bench.open()
            case 4:
                bench.cached.store.flush()
                bench.wipe_hbm()
            case 5 if turn == 11:
                bench.cached.store.invalidate()
            case 6:
                with torch.inference_mode():
                    reply = bench.check_reply(prompt, salt)
                said[who] = reply.clone()  # a tensor of that mode is no good outside of it
            case _:
                said[who] = bench.check_reply(prompt, salt)
        if bench.cached.last:
            sources |= {name for name in ("hbm", "dram", "nvme") if getattr(bench.last, name)}
    bench.check_accounts()
    bench.cached.close()
    assert "hbm" in sources
    assert sources & {"dram", "nvme"}


def test_a_hit_waits_for_nothing_but_its_layers(make_bench: Callable[..., Bench]) -> None:
    bench, prompt = make_bench(_lazy), _prompt(2 * CHUNK + 50)
    copying = list[bool]()

    def note() -> None:
        copying.append(any(stream.queue for stream in bench.toy.streams))

    with bench.open():
        bench.check_reply(prompt)
        bench.finish_copies()
        bench.wipe_hbm()
        with before_layer(bench.model, 1, note):
            bench.check_reply(prompt, max_new_tokens=1)
        assert bench.last.dram == 2 * CHUNK
        assert copying == [False, True], "of the hit, the first layer waited for all of them"
        assert bench.toy.num_blocked == 0
        bench.check_accounts()


def test_a_chunk_is_not_read_before_it_is_written(make_bench: Callable[..., Bench]) -> None:
    bench, prompt = make_bench(_lazy), _prompt(2 * CHUNK + 50)
    with bench.open():
        bench.check_reply(prompt)
        bench.wipe_hbm()
        bench.check_reply(prompt)
        assert bench.last.computed == prompt.shape[1]
        bench.toy.drain()
        bench.wipe_hbm()
        bench.check_reply(prompt)
        assert bench.last.dram == 2 * CHUNK
        bench.check_accounts()


def test_chunks_stay_pinned_until_they_are_copied(make_bench: Callable[..., Bench]) -> None:
    bench, prompt = make_bench(_lazy), _prompt(2 * CHUNK + 50)
    with bench.open() as cached:
        bench.check_reply(prompt)
        bench.finish_copies()
        bench.wipe_hbm()
        with pytest.raises(Interrupted):  # before any layer was waited for
            bench.interrupt(prompt, Interrupted(), after=0)
        assert cached.store.stats()["open_loads"] == 1
        bench.check_reply(_prompt(20, seed=1))
        assert cached.store.stats()["open_loads"] == 1, "its copy is not done"
        bench.finish_copies()
        assert cached.store.stats()["open_loads"] == 0
        bench.check_accounts()


def test_close_waits_for_all_copies(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those, too, that wait to be launched."""
    one_at_a_time = partial(Transfer, in_flight_bytes=1)
    monkeypatch.setattr("rootcellar.connector.copies.Transfer", one_at_a_time)
    bench, prompt = make_bench(_lazy), _prompt(5 * CHUNK + 5)
    with bench.open():
        bench.check_reply(prompt)
        assert bench.toy.num_blocked == 0
    with bench.open():
        bench.check_reply(prompt)
        assert bench.last.nvme == 5 * CHUNK
        bench.check_accounts()


def test_a_run_longer_than_dram_waits_for_its_slots(make_bench: Callable[..., Bench]) -> None:
    bench, prompt = make_bench(_lazy, dram_chunks=12, hbm_tokens=100), _prompt(10 * CHUNK + 5)
    with bench.open():
        bench.check_reply(prompt)
    bench.dram_chunks = 3
    with bench.open():
        bench.check_reply(prompt)
        assert bench.last.nvme == 10 * CHUNK
        assert bench.toy.num_blocked > 0
        bench.check_accounts()


def test_changed_weights_wait_for_copies_of_the_old_ones(make_bench: Callable[..., Bench]) -> None:
    bench, prompt = make_bench(_lazy), _prompt(2 * CHUNK + 50)
    weight = bench.model.get_parameter("model.layers.0.self_attn.k_proj.weight")
    with bench.open():
        bench.check_reply(prompt)
        weight.data.mul_(2.0)
        bench.check_reply(prompt)
        assert bench.last.computed == prompt.shape[1]
        weight.data.div_(2.0)
        bench.check_reply(prompt)
        assert bench.last.nvme == 2 * CHUNK
        bench.check_accounts()


def test_a_device_that_refuses_copies_fails_no_request(make_bench: Callable[..., Bench]) -> None:
    bench, prompt = make_bench(random.Random(0).randrange), _prompt(2 * CHUNK + 50)
    with bench.open():
        bench.check_reply(prompt)
        bench.finish_copies()
        for launches in range(4):
            bench.wipe_hbm()
            bench.toy.launches_left = launches
            longer = torch.cat([prompt, _prompt(CHUNK, seed=launches)], dim=1)
            bench.check_reply(longer)
            assert bench.last.dram in (0, 2 * CHUNK)
            bench.toy.launches_left = None
            bench.check_accounts()
            bench.wipe_hbm()
            bench.check_reply(longer)  # of what was not stored nothing is believed to be here
            bench.check_accounts()


class Drainer(BaseStreamer):
    """Gives the device time with every token, and notes how many loads are open then."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.open_loads: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.open_loads.append(self._bench.cached.store.stats()["open_loads"])
        self._bench.toy.drain()

    def end(self) -> None: ...


def test_a_step_gives_back_what_was_copied_meanwhile(make_bench: Callable[..., Bench]) -> None:
    bench, prompt = make_bench(_lazy), _prompt(2 * CHUNK + 50)
    with bench.open() as cached:
        bench.check_reply(prompt)
        bench.finish_copies()
        bench.wipe_hbm()
        drainer = Drainer(bench)
        cached.generate(prompt, max_new_tokens=3, pad_token_id=0, streamer=drainer)
        assert drainer.open_loads == [1, 0, 0, 0]


def test_a_prefill_that_waited_for_its_kv_is_no_measure_of_prefill(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[int]()
    monkeypatch.setattr(
        TieredStore, "observe_prefill", lambda store, tokens, seconds: told.append(tokens)
    )
    bench, prompt = make_bench(_lazy), _prompt(2 * CHUNK + 50)
    with bench.open():
        bench.check_reply(prompt)
        bench.check_reply(prompt)
        assert told == [len(prompt[0]), 1]  # the second time all of it was in HBM
        bench.finish_copies()
        bench.wipe_hbm()
        told.clear()
        bench.check_reply(prompt)
        assert bench.last.dram == 2 * CHUNK
        assert told == []
