"""Whatever tier serves, generate() returns what the model returns without one."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from rootcellar.admission.always import Always
from rootcellar.admission.base import Answer, Boundary, Chain, Decision, Offer
from rootcellar.connector.dynamic_cache import model_layout
from rootcellar.connector.served import Served
from rootcellar.connector.transformers import CachedModel
from rootcellar.connector.unsupported import UnsupportedModelError, UnsupportedRequestError
from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.errors import StoreClosedError
from rootcellar.tiers.store import TieredStore

MakeModel = Callable[..., PreTrainedModel]

CHUNK = 256
MIB = 1 << 20


class Interrupted(BaseException):
    """Like KeyboardInterrupt, no Exception."""


class Collector(BaseStreamer):
    def __init__(self, fail_after: int | None = None) -> None:
        self.tokens: list[int] = []
        self.ended = False
        self._fail_after = fail_after

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()
        if self._fail_after is not None:
            self._fail_after -= 1
            if self._fail_after < 0:
                raise Interrupted

    def end(self) -> None:
        self.ended = True


def _open(
    model: PreTrainedModel, path: Path | None = None, hbm_tokens: int = 2048, dram: int = MIB * 8
) -> CachedModel:
    nvme_bytes = 64 * MIB if path else 0
    config = StoreConfig(
        dram_bytes=dram,
        nvme_path=path,
        nvme_bytes=nvme_bytes,
        io="threads",
        admission=Always,
    )
    return CachedModel(model, config, hbm_tokens=hbm_tokens)


def _prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(6, 100, (1, length), generator=torch.Generator().manual_seed(seed))


def _expected(model: Any, prompt: torch.Tensor, **arguments: Any) -> Any:
    return model.generate(prompt, **arguments)


def _last(cached: CachedModel) -> Served:
    assert cached.last is not None
    return cached.last


def _wipe_hbm(cached: CachedModel) -> None:
    cached.pool.free(cached.tree.evict(len(cached.tree)))
    cached.pool.pages.fill_(float("nan"))


def _check_accounts(cached: CachedModel) -> None:
    """Every slot is free or in the tree, nothing is pinned, no load is open."""
    cached.tree.check_integrity()
    cached.pool.check_integrity()
    assert cached.pool.num_free + len(cached.tree) == cached.pool.num_tokens
    assert cached.store.stats()["open_loads"] == 0
    cached.store.check_integrity()
    held = len(cached.tree)
    freed = cached.tree.evict(held)
    assert len(freed) == held, "something is still pinned"
    cached.pool.free(freed)


@pytest.fixture(autouse=True)
def loads_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models this small compute sooner than a disk can be asked."""
    monkeypatch.setattr(TieredStore, "observe_prefill", lambda store, tokens, seconds: None)


@pytest.fixture
def model(make_model: MakeModel) -> PreTrainedModel:
    return make_model()


@pytest.fixture
def cached(model: PreTrainedModel) -> Iterator[CachedModel]:
    with _open(model) as opened:
        yield opened
        _check_accounts(opened)


def test_conversations_in_any_order_get_the_same_replies(
    make_model: MakeModel, family: str, tmp_path: Path
) -> None:
    model, rng = make_model(family), random.Random(family)
    said = [_prompt(200)] * 3
    sources: set[str] = set()
    dram = 5 * model_layout(model).chunk_bytes
    with _open(model, tmp_path, hbm_tokens=700, dram=dram) as cached:
        for turn in range(14):
            who = rng.randrange(3)
            heard = _prompt(rng.randrange(1, 300), seed=turn)
            prompt = torch.cat([said[who], heard], dim=1)
            arguments: Any = {"max_new_tokens": rng.randrange(1, 8), "pad_token_id": 0}
            said[who] = _expected(model, prompt, **arguments)
            assert torch.equal(cached.generate(prompt, **arguments), said[who])
            last = _last(cached)
            assert last.hbm + last.dram + last.nvme + last.computed == prompt.shape[1]
            sources |= {name for name in ("hbm", "dram", "nvme") if getattr(last, name)}
            cached.store.flush()
        _check_accounts(cached)
    assert sources == {"hbm", "dram", "nvme"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", ["hbm", "dram", "nvme"])
def test_logits_after_a_hit_are_equal_bit_for_bit_to_those_at_the_same_split(
    make_model: MakeModel, tmp_path: Path, tier: str, dtype: torch.dtype
) -> None:
    model = make_model()
    torch.nn.Module.to(model, dtype)
    head, rest = _prompt(2 * CHUNK), _prompt(77, seed=1)
    prompt = torch.cat([head, rest], dim=1)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(head, cache=cache, use_cache=True)
        expected = model(rest, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()

    cached = _open(model, tmp_path)
    cached.generate(head, max_new_tokens=1, pad_token_id=0)
    if tier == "dram":
        _wipe_hbm(cached)
    if tier == "nvme":
        cached.close()
        cached = _open(model, tmp_path)
    with cached:
        logits = _first_logits(cached, prompt)

    assert getattr(_last(cached), tier) == 2 * CHUNK
    assert _last(cached).computed == 77
    assert torch.equal(logits, expected)


def _first_logits(cached: CachedModel, prompt: torch.Tensor) -> torch.Tensor:
    output = cached.generate(
        prompt, max_new_tokens=1, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def test_a_chunk_the_tree_holds_in_part_is_loaded_for_the_rest(
    model: PreTrainedModel, cached: CachedModel
) -> None:
    prompt = _prompt(3 * CHUNK)
    cached.generate(prompt, max_new_tokens=2, pad_token_id=0)
    held = len(cached.tree)
    cached.pool.free(cached.tree.evict(held - 300))
    again = torch.cat([prompt, _prompt(10, seed=1)], dim=1)
    tokens = cached.generate(again, max_new_tokens=2, pad_token_id=0)
    assert torch.equal(tokens, _expected(model, again, max_new_tokens=2, pad_token_id=0))
    last = _last(cached)
    assert (last.hbm, last.dram, last.computed) == (300, 3 * CHUNK - 300, 10)


def test_a_repeated_prompt_computes_one_token(model: PreTrainedModel, cached: CachedModel) -> None:
    prompt = _prompt(2 * CHUNK)
    for _ in range(2):
        tokens = cached.generate(prompt, max_new_tokens=3, pad_token_id=0)
        assert torch.equal(tokens, _expected(model, prompt, max_new_tokens=3, pad_token_id=0))
    assert (_last(cached).hbm, _last(cached).computed) == (2 * CHUNK - 1, 1)


def test_a_reply_is_kept_with_its_prompt(cached: CachedModel) -> None:
    tokens = cached.generate(_prompt(250), max_new_tokens=20, pad_token_id=0)
    cached.generate(tokens, max_new_tokens=1, pad_token_id=0)
    assert _last(cached).hbm == 250 + 20 - 1
    _wipe_hbm(cached)
    cached.generate(tokens, max_new_tokens=1, pad_token_id=0)
    assert _last(cached).dram == CHUNK


def test_a_run_longer_than_dram_is_loaded_in_pieces(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt = _prompt(10 * CHUNK + 5)
    with _open(model, tmp_path, hbm_tokens=100) as cached:
        cached.generate(prompt, max_new_tokens=1, pad_token_id=0)
    with _open(model, tmp_path, hbm_tokens=100, dram=3 * 132 * 1024) as cached:
        tokens = cached.generate(prompt, max_new_tokens=5, pad_token_id=0)
        assert _last(cached).nvme == 10 * CHUNK
        _check_accounts(cached)
    assert torch.equal(tokens, _expected(model, prompt, max_new_tokens=5, pad_token_id=0))


@pytest.mark.parametrize("hbm_tokens", [1, 100, 300])
def test_prompts_larger_than_the_pool_are_served(model: PreTrainedModel, hbm_tokens: int) -> None:
    with _open(model, hbm_tokens=hbm_tokens) as cached:
        for seed in (0, 1, 0):
            prompt = _prompt(CHUNK + 50, seed)
            tokens = cached.generate(prompt, max_new_tokens=4, pad_token_id=0)
            assert torch.equal(tokens, _expected(model, prompt, max_new_tokens=4, pad_token_id=0))
            assert len(cached.tree) <= hbm_tokens
        assert _last(cached).dram == CHUNK
        _check_accounts(cached)


def test_a_viral_prompt_is_in_hbm_by_its_second_request(model: PreTrainedModel) -> None:
    """Under the default policy, while one-off prompts come by, which stay out of a full HBM."""
    config = StoreConfig(dram_bytes=8 * MIB)
    with CachedModel(model, config, hbm_tokens=3 * CHUNK) as cached:
        for seed in range(4):
            cached.generate(_prompt(2 * CHUNK + 50, seed), max_new_tokens=2, pad_token_id=0)
        viral = _prompt(2 * CHUNK + 50, seed=99)
        for _ in range(2):
            cached.generate(viral, max_new_tokens=2, pad_token_id=0)
        cached.generate(_prompt(2 * CHUNK + 50, seed=100), max_new_tokens=2, pad_token_id=0)
        cached.generate(viral, max_new_tokens=2, pad_token_id=0)
        assert _last(cached).hbm >= 2 * CHUNK


ARGUMENTS: list[dict[str, Any]] = [
    {"do_sample": True, "temperature": 1.5, "top_k": 20},
    {"do_sample": True, "top_p": 0.8},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"eos_token_id": list(range(6, 40))},
    {"attention_mask": torch.ones((1, 300), dtype=torch.long)},
    {"prefill_chunk_size": 64},
    {"min_new_tokens": 3, "eos_token_id": 7},
    {"return_dict_in_generate": True, "output_scores": True},
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_of_generate_mean_what_they_mean_without_a_cache(
    model: PreTrainedModel, cached: CachedModel, arguments: dict[str, Any]
) -> None:
    prompt = _prompt(300)
    arguments = {"max_new_tokens": 12, "pad_token_id": 0} | arguments
    for _ in range(2):
        torch.manual_seed(5)
        expected = _expected(model, prompt, **arguments)
        torch.manual_seed(5)
        output = cached.generate(prompt, **arguments)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(output, expected)
        else:
            assert torch.equal(output.sequences, expected.sequences)
            torch.testing.assert_close(output.scores, expected.scores, atol=1e-4, rtol=1e-4)
            assert output.cache.get_seq_length() == expected.cache.get_seq_length()
    assert _last(cached).hbm == 299


def test_a_streamer_gets_the_same_tokens(model: PreTrainedModel, cached: CachedModel) -> None:
    prompt = _prompt(300)
    streamers = [Collector(), Collector(), Collector()]
    expected = _expected(model, prompt, max_new_tokens=5, pad_token_id=0, streamer=streamers[0])
    for streamer in streamers[1:]:
        cached.generate(prompt, max_new_tokens=5, pad_token_id=0, streamer=streamer)
        assert streamer.tokens == streamers[0].tokens == expected[0].tolist()
        assert streamer.ended


def test_stopping_criteria_of_the_caller_are_heard(cached: CachedModel) -> None:
    def stop_at_twenty(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((1,), input_ids.shape[1] >= 320)

    given = [stop_at_twenty]
    tokens = cached.generate(
        _prompt(300), max_new_tokens=50, pad_token_id=0, stopping_criteria=given
    )
    assert tokens.shape == (1, 320)
    assert given == [stop_at_twenty]


def test_inference_mode_may_come_and_go(model: PreTrainedModel, cached: CachedModel) -> None:
    prompt = _prompt(600)
    expected = _expected(model, prompt, max_new_tokens=3, pad_token_id=0)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert torch.equal(cached.generate(prompt, max_new_tokens=3, pad_token_id=0), expected)
        _wipe_hbm(cached)


@pytest.mark.parametrize("fail_after", [0, 1, 3])
def test_a_request_that_is_interrupted_leaves_nothing_behind(
    model: PreTrainedModel, fail_after: int
) -> None:
    prompt, longer = _prompt(300), _prompt(700)
    with _open(model, hbm_tokens=512) as cached:
        cached.generate(prompt, max_new_tokens=2, pad_token_id=0)
        with pytest.raises(Interrupted):
            cached.generate(
                longer, max_new_tokens=9, pad_token_id=0, streamer=Collector(fail_after)
            )
        tokens = cached.generate(longer, max_new_tokens=3, pad_token_id=0)
        assert torch.equal(tokens, _expected(model, longer, max_new_tokens=3, pad_token_id=0))
        _check_accounts(cached)


@pytest.mark.parametrize(
    "fails",
    [
        "connector.copies.gather",
        "connector.copies.scatter",
        "tiers.movers.InPlace.store",
        "tiers.movers.InPlace.load",
    ],
)
def test_a_copy_that_is_interrupted_leaves_nothing_behind(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise Interrupted

    prompt = _prompt(600)
    doubled = torch.cat([prompt, prompt], dim=1)
    with _open(model, hbm_tokens=700) as cached:
        cached.generate(prompt, max_new_tokens=2, pad_token_id=0)
        cached.pool.free(cached.tree.evict(len(cached.tree) - 300))  # the rest is in DRAM alone
        with monkeypatch.context() as patch:
            patch.setattr(f"rootcellar.{fails}", interrupted)
            with pytest.raises(Interrupted):
                cached.generate(doubled, max_new_tokens=2, pad_token_id=0)
        for again in (prompt, doubled):
            tokens = cached.generate(again, max_new_tokens=8, pad_token_id=0)
            assert torch.equal(tokens, _expected(model, again, max_new_tokens=8, pad_token_id=0))
        _wipe_hbm(cached)
        cached.generate(doubled, max_new_tokens=1, pad_token_id=0)
        assert _last(cached).dram == 4 * CHUNK, "the store was kept from having a chunk"
        _check_accounts(cached)


def test_a_refused_request_changes_nothing(cached: CachedModel) -> None:
    prompt = _prompt(300)
    with pytest.raises(UnsupportedRequestError, match="beam_search"):
        cached.generate(prompt, num_beams=2)
    with pytest.raises(TypeError, match="salt"):
        cached.generate(prompt, salt=5)  # type: ignore[arg-type]  # what the test is about
    assert cached.last is None
    assert len(cached.tree) == 0


def test_requests_with_different_salts_share_nothing(cached: CachedModel) -> None:
    prompt = _prompt(600)
    salts: list[str | bytes | None] = [None, "", "tenant", b"tenant", "other"]
    for salt in salts:
        cached.generate(prompt, salt=salt, max_new_tokens=1, pad_token_id=0)
        assert _last(cached).computed == 600
    for salt in salts:
        cached.generate(prompt, salt=salt, max_new_tokens=1, pad_token_id=0)
        assert _last(cached).computed < 600


def test_models_that_differ_share_nothing_in_one_directory(
    make_model: MakeModel, tmp_path: Path
) -> None:
    prompt = _prompt(600)
    for seed, found in ((0, 0), (1, 0), (0, 2 * CHUNK), (1, 2 * CHUNK)):
        with _open(make_model(seed=seed), tmp_path) as cached:
            cached.generate(prompt, max_new_tokens=1, pad_token_id=0)
            assert _last(cached).nvme == found


def test_kv_of_weights_edited_while_generating_is_not_kept(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    prompt = _prompt(600)
    weight = model.get_parameter("model.layers.0.self_attn.v_proj.weight")

    def edit(ids: torch.Tensor, scores: torch.Tensor, **arguments: object) -> torch.Tensor:
        weight.mul_(2.0)
        return torch.zeros(len(ids), dtype=torch.bool)

    with _open(model, tmp_path) as cached:
        cached.generate(
            prompt, max_new_tokens=3, pad_token_id=0, stopping_criteria=StoppingCriteriaList([edit])
        )
        weight.data.div_(8.0)  # as it was
        tokens = cached.generate(prompt, max_new_tokens=4, pad_token_id=0)
        expected = _expected(model, prompt, max_new_tokens=4, pad_token_id=0)
        assert torch.equal(tokens, expected)
        assert _last(cached).computed == 600
        _check_accounts(cached)


def test_weights_edited_in_place_are_not_served_old_kv(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    prompt = _prompt(600)
    weight = model.get_parameter("model.layers.0.self_attn.k_proj.weight")
    original = weight.detach().clone()
    with _open(model, tmp_path) as cached:
        for factor in (2.0, -1.0):
            cached.generate(prompt, max_new_tokens=4, pad_token_id=0)
            weight.data.mul_(factor)
            tokens = cached.generate(prompt, max_new_tokens=4, pad_token_id=0)
            expected = _expected(model, prompt, max_new_tokens=4, pad_token_id=0)
            assert torch.equal(tokens, expected)
            assert _last(cached).computed == 600
        weight.data.copy_(original)
        cached.generate(prompt, max_new_tokens=4, pad_token_id=0)
        assert _last(cached).nvme == 2 * CHUNK, "the first weights have their own KV still"
        _check_accounts(cached)


def test_a_model_cast_between_requests_is_served_in_its_new_dtype(
    model: PreTrainedModel, cached: CachedModel
) -> None:
    prompt = _prompt(300)
    cached.generate(prompt, max_new_tokens=1, pad_token_id=0)
    torch.nn.Module.to(model, torch.bfloat16)
    tokens = cached.generate(prompt, max_new_tokens=4, pad_token_id=0)
    assert torch.equal(tokens, _expected(model, prompt, max_new_tokens=4, pad_token_id=0))
    assert cached.pool.pages.dtype == torch.bfloat16


def test_a_model_that_becomes_unsupported_is_refused_until_it_is_not(
    model: PreTrainedModel, cached: CachedModel
) -> None:
    prompt = _prompt(300)
    cached.generate(prompt, max_new_tokens=1, pad_token_id=0)
    model.train()
    with pytest.raises(UnsupportedModelError, match="training"):
        cached.generate(prompt, max_new_tokens=1, pad_token_id=0)
    model.train(False)
    cached.generate(prompt, max_new_tokens=1, pad_token_id=0)
    assert _last(cached).hbm == 299


def test_a_model_that_cannot_be_served_opens_nothing(make_model: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="full attention"):
        _open(make_model("mistral", sliding_window=64), tmp_path / "store")
    with pytest.raises(ValueError, match="hbm_tokens is 0"):
        _open(make_model(), tmp_path / "store", hbm_tokens=0)
    assert not (tmp_path / "store").exists()


def test_a_closed_model_says_so(model: PreTrainedModel) -> None:
    cached = _open(model)
    cached.close()
    cached.close()
    with pytest.raises(StoreClosedError, match="closed CachedModel"):
        cached.generate(_prompt(5))


def test_chunks_are_written_down_while_later_requests_are_served(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    """DRAM holds two chunks: what came first must have left it before the next may enter."""
    prompts = [_prompt(2 * CHUNK + 1, seed) for seed in range(3)]
    dram = 2 * model_layout(model).chunk_bytes

    with _open(model, tmp_path, dram=dram) as cached:
        store = cached.store

        def stop_when_written(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            time.sleep(0.005)
            return torch.full((1,), store.stats()["writes_pending"] == 0)

        for prompt in prompts:
            cached.generate(prompt, max_new_tokens=1, pad_token_id=0)
            cached.generate(
                _prompt(5),
                max_new_tokens=3000,
                pad_token_id=0,
                stopping_criteria=[stop_when_written],
            )
        _wipe_hbm(cached)
        for prompt in prompts:
            cached.generate(prompt, max_new_tokens=1, pad_token_id=0)
            assert _last(cached).dram + _last(cached).nvme == 2 * CHUNK


class OnlyTwice(Always):
    """Keeps out of HBM, where room is short, what was not asked for twice."""

    def __init__(self) -> None:
        self.seen: Counter[bytes] = Counter()
        self.offers: list[Offer] = []

    def observe(self, chain: Chain, now_s: float) -> None:
        self.seen.update(chain)

    def decide(self, offer: Offer) -> Decision:
        if offer.boundary is not Boundary.INTO_HBM:
            return super().decide(offer)
        self.offers.append(offer)
        known = [self.seen[key] > 1 for key in offer.chain[offer.start :]]
        stop = offer.start + (known.index(False) if False in known else len(known))
        return Decision(Answer.ADMIT, stop, "seen once")


def test_a_one_off_prompt_takes_no_place_in_hbm_from_a_hot_one(model: PreTrainedModel) -> None:
    policy, hot, one_off = OnlyTwice(), _prompt(520, seed=1), _prompt(300, seed=2)
    config = StoreConfig(dram_bytes=8 * MIB, admission=lambda: policy)
    with CachedModel(model, config, hbm_tokens=700) as cached:
        cached.generate(hot, max_new_tokens=2)
        assert policy.offers == []  # there was room for all of it
        cached.generate(one_off, max_new_tokens=2)
        assert [(offer.start, offer.free_chunks) for offer in policy.offers] == [(0, 0)]
        assert cached.store.stats()["refusals"] == {"into_hbm: seen once": 1}
        cached.generate(hot, max_new_tokens=2)
        assert _last(cached).hbm == 519
        cached.generate(one_off, max_new_tokens=2)
        assert (_last(cached).dram, _last(cached).hbm) == (256, 0)  # the store had it
        cached.generate(one_off, max_new_tokens=2)
        assert _last(cached).hbm >= 256  # asked for twice: it has its place now
        assert torch.equal(
            cached.generate(hot, max_new_tokens=2), _expected(model, hot, max_new_tokens=2)
        )
        _check_accounts(cached)


def test_what_a_prefill_took_is_told_to_the_store(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, float]] = []
    monkeypatch.setattr(
        TieredStore,
        "observe_prefill",
        lambda store, tokens, seconds: told.append((tokens, seconds)),
    )
    with _open(model) as cached:
        for _ in range(2):
            cached.generate(_prompt(300), max_new_tokens=2)
        assert [tokens for tokens, _ in told] == [300, 1]
        assert all(0 < seconds < 60 for _, seconds in told)
