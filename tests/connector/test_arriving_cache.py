"""A cache whose KV is on its way is, whatever transformers does with it, the cache it will be."""

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import DynamicLayer

from rootcellar.connector.arriving_cache import ArrivingKV
from rootcellar.tiers.device import Event
from rootcellar.tiers.layout import KVLayout
from rootcellar.tiers.movers import ChunkCopy
from rootcellar.tiers.toy_device import ToyDevice, ToyEvent
from rootcellar.tiers.transfer import CopyJob, Transfer

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", chunk_tokens=8)
CONFIG = LlamaConfig(num_hidden_layers=3, num_attention_heads=2, hidden_size=8)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def every_layer_arrives_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootcellar.tiers.batches.LAYER_BYTES", 1)


@pytest.fixture
def toy() -> ToyDevice:
    return ToyDevice(random.Random(0).randrange, compute="caller")


def _states(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Of all layers, keys and values: (num_layers, 2, 1, heads, tokens, head_dim)."""
    shape = (LAYOUT.num_layers, 2, 1, LAYOUT.num_kv_heads, num_tokens, LAYOUT.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _plain(states: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=CONFIG)
    for layer, (keys, values) in enumerate(states):
        cache.update(keys.clone(), values.clone(), layer)
    return cache


def _load(toy: ToyDevice, kv: ArrivingKV, states: torch.Tensor) -> CopyJob:
    """Bring whole chunks of `states` into the next pages of kv."""
    step, begin, copies = LAYOUT.chunk_tokens, kv.num_tokens, list[ChunkCopy]()
    for at in range(0, states.shape[-2], step):
        chunk = states[..., at : at + step, :].squeeze(2).transpose(2, 3).contiguous()
        slot = chunk.view(torch.uint8).view(-1)
        copies.append(ChunkCopy(kv.pages, np.arange(begin + at, begin + at + step), slot, step))
    transfer = Transfer(toy, staging_bytes=1 << 20)
    job = transfer.load(copies, by_layer=True)
    kv.extend(states.shape[-2], job)
    return job


def _arriving(toy: ToyDevice, states: torch.Tensor, room: int = 40) -> DynamicCache:
    kv = ArrivingKV(LAYOUT, room, CPU)
    for layer in kv.pages.planes:
        layer.fill_(0xA5)
    _load(toy, kv, states[..., :8, :])
    _load(toy, kv, states[..., 8:, :])
    return kv.cache(CONFIG)


def _layers(cache: DynamicCache) -> list[Any]:
    """Typed as what they are here: transformers has layers without keys, too."""
    return list(cache.layers)


def _is_past(event: Event) -> bool:
    """To query it would let time pass."""
    assert isinstance(event, ToyEvent)
    return event.at_ms is not None


def _append(num_tokens: int) -> Callable[[DynamicCache], DynamicCache]:
    def append(cache: DynamicCache) -> DynamicCache:
        for layer, (keys, values) in enumerate(_states(num_tokens, seed=1)):
            whole = cache.update(keys, values, layer)
            held = _layers(cache)[layer]
            assert whole[0] is held.keys
            assert whole[1] is held.values
        return cache

    return append


def _each(name: str, *arguments: Any) -> Callable[[DynamicCache], DynamicCache]:
    def call(cache: DynamicCache) -> DynamicCache:
        getattr(cache, name)(*arguments)
        return cache

    return call


def _offload(cache: DynamicCache) -> DynamicCache:
    for layer in _layers(cache):
        layer.offload()
        layer.prefetch()
    return cache


OPERATIONS: dict[str, Callable[[DynamicCache], DynamicCache]] = {
    "nothing": lambda cache: cache,
    "fill the room": _append(16),
    "append a part": _append(5),
    "append twice": lambda cache: _append(3)(_append(16)(cache)),
    "append beyond the room": _append(20),
    "crop": _each("crop", -3),
    "reorder": _each("reorder_cache", torch.tensor([0])),
    "repeat": _each("batch_repeat_interleave", 2),
    "select": _each("batch_select_indices", torch.tensor([0])),
    "copy": copy.deepcopy,
    "send": lambda cache: pickle.loads(pickle.dumps(cache)),
    "offload": _offload,
    "crop, then append": lambda cache: _append(17)(_each("crop", -1)(cache)),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_done_to_it_first_finds_all_its_kv(operation: str, seed: int) -> None:
    toy, states = ToyDevice(random.Random(seed).randrange, compute="caller"), _states(24)
    arrived = OPERATIONS[operation](_arriving(toy, states))
    expected = OPERATIONS[operation](_plain(states))
    for layer, plain in zip(_layers(arrived), _layers(expected), strict=True):
        assert torch.equal(layer.keys, plain.keys)
        assert torch.equal(layer.values, plain.values)
        assert type(layer) is DynamicLayer
        assert vars(layer).keys() == vars(plain).keys()
        assert layer.get_seq_length() == plain.get_seq_length()
    assert toy.num_blocked == 0


def test_what_needs_no_kv_waits_for_none(toy: ToyDevice) -> None:
    cache, plain = _arriving(toy, _states(24)), _plain(_states(24))
    toy.now_ms = 0
    assert cache.get_seq_length() == plain.get_seq_length() == 24
    assert cache.get_seq_length(2) == 24
    assert cache.get_mask_sizes(1, 0) == plain.get_mask_sizes(1, 0)
    assert len(cache) == 3
    assert not hasattr(cache.layers[0], "batch_size")
    assert repr(cache)
    assert toy.now_ms == 0


def test_a_reset_cache_is_empty_and_overwritten_by_nothing(toy: ToyDevice) -> None:
    cache = _arriving(toy, _states(24))
    _each("reset")(cache)
    assert cache.get_seq_length() == 0
    _append(2)(cache)
    toy.drain()
    assert torch.equal(_layers(cache)[0].keys, _states(2, seed=1)[0, 0])


def test_a_layer_waits_for_no_later_one() -> None:
    toy, kv = ToyDevice(lambda below: 0, compute="caller"), ArrivingKV(LAYOUT, 40, CPU)
    job = _load(toy, kv, _states(16))
    cache = kv.cache(CONFIG)
    assert _layers(cache)[0].keys is not None
    assert [_is_past(part.end) for part in job.launched] == [True, False, False]
    assert _layers(cache)[2].keys is not None
    assert _is_past(job.launched[2].end)


def test_prefill_appends_where_the_prompt_has_its_room(toy: ToyDevice) -> None:
    cache = _arriving(toy, _states(24))
    _append(16)(cache)
    for layer in _layers(cache):
        assert layer.keys.untyped_storage().data_ptr() == layer.values.untyped_storage().data_ptr()
        assert layer.keys.is_contiguous()


def test_a_cache_of_nothing_is_plain_and_takes_no_memory() -> None:
    kv = ArrivingKV(LAYOUT, 1 << 50, CPU)
    cache = kv.cache(CONFIG)
    assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 3
    assert cache.get_seq_length() == 0


def test_copies_that_are_done_are_not_kept_by_the_cache(toy: ToyDevice) -> None:
    kv = ArrivingKV(LAYOUT, 40, CPU)
    job = _load(toy, kv, _states(16))
    toy.drain()
    cache, slot = kv.cache(CONFIG), weakref.ref(job.launched[0].batch.copies[0].slot)
    del kv, job
    gc.collect()
    assert slot() is None
    assert cache.get_seq_length() == 16
