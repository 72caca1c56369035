"""KV is never served to another adapter, tenant, model or position scheme, and to equals it is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from .engines import Answer, assert_same, engine, plain, store, tokens, whole_chunks
from .models import save_adapter, save_model

PROMPT = tokens(2000)
WHOLE = whole_chunks(len(PROMPT))


def _ask(model: Path, extra: Mapping[str, Any] | None, **settings: Any) -> Answer:
    """Of an engine that starts, answers PROMPT and ends."""
    with engine(model, None if extra is None else dict(extra), **settings) as asked:
        (answer,) = asked.ask([PROMPT])
        if extra is not None:
            asked.settle()
    return answer


def test_tenants_with_different_salts_share_nothing(llama: Path, tmp_path: Path) -> None:
    expected = plain(llama, [PROMPT])
    for wanted in (0, WHOLE):  # a first start, and a restart
        with engine(llama, store(tmp_path / "kv")) as shared:
            for salt in ("a", "b", None):
                answers = shared.ask([PROMPT], salt=salt)
                assert_same(answers, expected)
                assert answers[0].cached == wanted
                shared.settle()
                shared.forget()


def test_adapters_share_nothing_with_each_other_or_the_model(
    llama: Path, models: Path, tmp_path: Path
) -> None:
    paths = [save_adapter(models / f"adapter-{seed}", seed) for seed in range(2)]
    adapters = [None, *(LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1))]
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
    with engine(llama, enable_prefix_caching=False, **settings) as without:
        expected = [without.ask([PROMPT], adapter=adapter) for adapter in adapters]
    assert len({answers[0].tokens for answers in expected}) == 3, "the adapters do nothing"
    for wanted in (0, WHOLE):  # a first start, and a restart
        with engine(llama, store(tmp_path / "kv"), **settings) as shared:
            for adapter, answers in zip(adapters, expected, strict=True):
                warm = shared.ask([PROMPT], adapter=adapter)
                assert_same(warm, answers)
                assert warm[0].cached == wanted
                shared.settle()
                shared.forget()


def test_an_adapter_trained_further_under_the_same_name_and_path_hits_nothing_old(
    llama: Path, models: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 1}
    for seed in range(2):
        path = save_adapter(models / "retrained", seed)
        adapter = LoRARequest("retrained", 1, str(path))
        with engine(llama, enable_prefix_caching=False, **settings) as without:
            expected = without.ask([PROMPT], adapter=adapter)
        with engine(llama, store(tmp_path / "kv"), **settings) as shared:
            answers = shared.ask([PROMPT], adapter=adapter)
            assert_same(answers, expected)
            assert answers[0].cached == 0
            shared.settle()


def test_another_position_scheme_hits_nothing_and_the_first_one_hits_again(
    llama: Path, tmp_path: Path
) -> None:
    extra = store(tmp_path / "kv")
    ropes: list[dict[str, Any]] = [
        {},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ]
    expected = [_ask(llama, None, hf_overrides=rope) for rope in ropes]
    assert len({answer.tokens for answer in expected}) == len(ropes), "the schemes do nothing"
    for wanted in (0, WHOLE):
        answers = [_ask(llama, extra, hf_overrides=rope) for rope in ropes]
        assert_same(answers, expected)
        assert [answer.cached for answer in answers] == [wanted] * len(ropes)


def test_other_weights_under_the_same_name_hit_nothing_and_the_first_ones_hit_again(
    models: Path, tmp_path: Path
) -> None:
    extra, path = store(tmp_path / "kv"), models / "in-place"
    expected: list[Answer] = []
    for seed in range(2):
        save_model(path, seed=seed)
        expected.append(_ask(path, None))
        assert_same([answer := _ask(path, extra)], [expected[seed]])
        assert answer.cached == 0
    save_model(path, seed=0)
    assert_same([answer := _ask(path, extra)], [expected[0]])
    assert answer.cached == WHOLE


def test_another_data_type_hits_nothing(llama: Path, tmp_path: Path) -> None:
    extra = store(tmp_path / "kv")
    assert _ask(llama, extra).cached == 0
    assert _ask(llama, extra, dtype="bfloat16").cached == 0
    assert _ask(llama, extra).cached == WHOLE


def test_weights_updated_in_place_make_everything_stored_before_unreachable(
    llama: Path, tmp_path: Path
) -> None:
    extra = store(tmp_path / "kv")
    with engine(llama, extra) as updated:
        updated.ask([PROMPT])
        updated.settle()
        # What a trainer does after it has put new weights in.
        assert updated.llm.reset_prefix_cache(reset_connector=True)
        (after,) = updated.ask([PROMPT])
        assert after.cached == 0
        updated.settle()
        updated.forget()
        assert updated.ask([PROMPT])[0].cached == WHOLE
        updated.check_at_rest()
    assert _ask(llama, extra).cached == 0
