"""A request gets its reply, and the next one too, whatever fails around the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from rootcellar.admission.always import Always
from rootcellar.connector import transformers as connector
from rootcellar.connector.copies import ColdCopies
from rootcellar.connector.transformers import CachedModel
from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.store import TieredStore

MakeModel = Callable[..., PreTrainedModel]
ARGUMENTS: dict[str, Any] = {"max_new_tokens": 3, "pad_token_id": 0}


class Calling(BaseStreamer):
    """Calls when the first token is there: the prompt's KV is computed by then."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._num_put = 0

    def put(self, value: torch.Tensor) -> None:
        self._num_put += 1
        if self._num_put == 2:  # the first is the prompt
            self._call()

    def end(self) -> None: ...


def _open(model: PreTrainedModel, path: Path | None = None) -> CachedModel:
    config = StoreConfig(
        dram_bytes="8MiB",
        nvme_path=path,
        nvme_bytes="64MiB" if path else 0,
        io="threads",
        admission=Always,
    )
    return CachedModel(model, config, hbm_tokens=2048)


def _prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(6, 100, (1, length), generator=torch.Generator().manual_seed(seed))


def _check_reply(model: Any, cached: CachedModel, prompt: torch.Tensor) -> None:
    expected = model.generate(prompt, **ARGUMENTS)
    assert torch.equal(cached.generate(prompt, **ARGUMENTS), expected)


def _edit(model: PreTrainedModel) -> None:
    weights = model.get_parameter("model.layers.0.self_attn.k_proj.weight")
    weights.data.mul_(2)


def test_a_request_inside_another_that_sees_new_weights_leaves_none_of_the_old_kv(
    make_model: MakeModel,
) -> None:
    model, prompt = make_model(), _prompt(300)

    def edit_and_ask() -> None:
        _edit(model)
        cached.generate(_prompt(40, seed=1), **ARGUMENTS)

    with _open(model) as cached:
        cached.generate(prompt, streamer=Calling(edit_and_ask), **ARGUMENTS)
        _check_reply(model, cached, prompt)


def test_a_store_that_cannot_be_opened_again_is_opened_by_the_next_request(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> TieredStore:
        raise OSError("no memory")

    model = make_model()
    with _open(model) as cached:
        _check_reply(model, cached, _prompt(300))
        _edit(model)
        with monkeypatch.context() as patched:
            patched.setattr(connector, "TieredStore", refuse)
            with pytest.raises(OSError, match="no memory"):
                cached.generate(_prompt(300), **ARGUMENTS)
        _check_reply(model, cached, _prompt(300))
        _check_reply(model, cached, _prompt(300))


def test_a_device_that_has_no_room_for_buffers_leaves_no_store_open(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> ColdCopies:
        raise torch.OutOfMemoryError("buffers")

    model = make_model()
    with monkeypatch.context() as patched:
        patched.setattr(connector, "ColdCopies", refuse)
        with pytest.raises(torch.OutOfMemoryError, match="buffers"):
            _open(model, tmp_path / "kv")
    with _open(model, tmp_path / "kv") as cached:
        _check_reply(model, cached, _prompt(300))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("pages"), MemoryError("pages")])
def test_without_memory_for_what_is_kept_or_restored_a_reply_is_computed(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    model, prompt = make_model(), _prompt(600)
    with _open(model) as cached:
        _check_reply(model, cached, prompt)
        with monkeypatch.context() as patched:
            patched.setattr(connector, "copy_pages", refuse)
            _check_reply(model, cached, prompt)  # neither restored from HBM nor kept
            assert cached.last is not None
            assert cached.last.computed == 600
            _check_reply(model, cached, _prompt(600, seed=1))
        _check_reply(model, cached, prompt)
        assert cached.last.hbm == 599
        cached.pool.check_integrity()
        assert cached.pool.num_free + len(cached.tree) == cached.pool.num_tokens
        assert cached.store.stats()["open_loads"] == 0
        cached.store.check_integrity()
