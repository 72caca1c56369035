"""Equal models have equal namespaces in every process; whatever changes KV changes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rootcellar.connector.dynamic_cache import model_layout
from rootcellar.connector.model_identity import ModelWatch, model_namespace, weights_digest
from rootcellar.connector.unsupported import UnsupportedModelError
from rootcellar.tiers.layout import Namespace

MakeModel = Callable[..., PreTrainedModel]
Edit = Callable[[PreTrainedModel], None]


def _namespace(model: PreTrainedModel) -> Namespace:
    return model_namespace(model, model_layout(model))


def _weight(model: PreTrainedModel) -> torch.nn.Parameter:
    return model.get_parameter("model.layers.1.mlp.up_proj.weight")


def _add_in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        _weight(model)[3, 5] += 1


def _scale_behind_autograd(model: PreTrainedModel) -> None:
    _weight(model).data.mul_(1.5)


def _replace_storage(model: PreTrainedModel) -> None:
    _weight(model).data = _weight(model).data.clone().add_(1)


def _replace_parameter(model: PreTrainedModel) -> None:
    layer = model.get_submodule("model.layers.1.mlp.up_proj")
    layer.weight = torch.nn.Parameter(_weight(model).detach() + 1)


def _load_other_weights(model: PreTrainedModel) -> None:
    state = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def _stretch_rope(model: PreTrainedModel) -> None:
    model.get_buffer("model.rotary_emb.inv_freq").mul_(0.5)


def _change_dtype(model: PreTrainedModel) -> None:
    torch.nn.Module.to(model, torch.bfloat16)


def _change_attention(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")


def _change_configuration(model: PreTrainedModel) -> None:
    model.config.rms_norm_eps = 1e-3


def _add_hook(model: PreTrainedModel) -> None:
    model.get_submodule("model.layers.0").register_forward_hook(lambda *_: None)


def _add_hook_before(model: PreTrainedModel) -> None:
    model.get_submodule("model.layers.0").register_forward_pre_hook(lambda *_: None)


EDITS: list[Edit] = [
    _add_hook,
    _add_hook_before,
    _add_in_place,
    _scale_behind_autograd,
    _replace_storage,
    _replace_parameter,
    _load_other_weights,
    _stretch_rope,
    _change_dtype,
    _change_attention,
    _change_configuration,
]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_model_is_noticed_and_is_another(make_model: MakeModel, edit: Edit) -> None:
    model = make_model()
    before, watch = _namespace(model), ModelWatch(model)
    assert not watch.changed()
    edit(model)
    assert watch.changed()
    assert _namespace(model) != before


def test_a_model_with_hooks_has_a_namespace_that_no_other_process_gets(
    make_model: MakeModel,
) -> None:
    model = make_model()
    _add_hook(model)
    assert not ModelWatch(model).changed()
    assert _namespace(model) != _namespace(model)


def test_generating_changes_nothing(make_model: MakeModel, family: str) -> None:
    model: Any = make_model(family)
    watch = ModelWatch(model)
    model.generate(torch.ones((1, 9), dtype=torch.long), max_new_tokens=3, pad_token_id=0)
    assert not watch.changed()


def test_weights_that_are_not_numbers_do_not_look_edited(make_model: MakeModel) -> None:
    model = make_model()
    _weight(model).data.fill_(float("nan"))
    assert not ModelWatch(model).changed()


def test_a_saved_model_is_the_same_wherever_it_is_loaded_from(
    make_model: MakeModel, tmp_path: Path
) -> None:
    digests: set[bytes] = set()
    for place in ("here", "there"):
        make_model().save_pretrained(tmp_path / place)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / place).train(False)
        digests.add(_namespace(loaded).digest)
    assert len(digests) == 1


def test_models_of_equal_shape_and_other_weights_differ(make_model: MakeModel) -> None:
    assert _namespace(make_model(seed=0)) == _namespace(make_model(seed=0))
    assert _namespace(make_model(seed=0)) != _namespace(make_model(seed=1))


def test_rope_settings_make_another_namespace(make_model: MakeModel) -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    spaces = [_namespace(make_model(rope_parameters=rope)) for rope in (plain, scaled)]
    assert spaces[0] != spaces[1]
    assert spaces[0].revision != spaces[1].revision, "RoPE frequencies belong to the weights"
    assert spaces[1].describe()["rope"]["rope_parameters"]["factor"] == 2.0


def test_a_hub_commit_names_the_weights_together_with_a_sample(make_model: MakeModel) -> None:
    model = make_model()
    model.config._commit_hash = "c0ffee"
    sampled = _namespace(model)
    assert sampled.revision.startswith("c0ffee+")
    _scale_behind_autograd(model)
    assert _namespace(model) != sampled
    edited = model_namespace(model, model_layout(model), trust_commit=False)
    assert edited.revision == weights_digest(model)


def test_the_digest_tells_every_element_and_every_name(make_model: MakeModel) -> None:
    model = make_model()
    before = weights_digest(model)
    _weight(model).data[-1, -1] += 1
    assert weights_digest(model) != before
    _weight(model).data[-1, -1] -= 1
    swapped = model.get_parameter("model.layers.0.mlp.up_proj.weight").data
    model.get_parameter("model.layers.0.mlp.up_proj.weight").data = _weight(model).data
    _weight(model).data = swapped
    assert weights_digest(model) != before


def test_weights_that_are_not_in_memory_are_refused(make_model: MakeModel) -> None:
    model = make_model()
    torch.nn.Module.to(model, "meta")
    with pytest.raises(UnsupportedModelError, match="not in memory"):
        weights_digest(model)
