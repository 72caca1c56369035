"""What a user writes is taken as meant or refused by name; nothing is passed over."""

import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.admission.choices import POLICIES
from rootcellar.admission.gated import Gated
from rootcellar.connector.vllm.settings import SPEC_MODULE, SPEC_NAME, Settings

NVME = {"nvme_path": "/nvme/kv", "nvme_bytes": "1TiB"}
VALID = {"dram_bytes", "nvme_path", "nvme_bytes", "block_size", "admission", "admission_min_seen"}
VALID |= {"codec", "io_lanes", "load_timeout_s", "weights_id", "offload_prompt_only"}
VALID |= {
    "nvme_bytes_per_day",
    "self_describing_kv_events",
    "write_down",
    "trace_path",
    "trace_bytes",
}


def _settings(**extra: Any) -> Settings:
    return Settings.from_extra_config({"dram_bytes": "1GiB"} | extra)


def test_only_the_size_of_dram_has_to_be_given() -> None:
    settings = _settings()
    assert settings.nvme_path is None
    assert settings.offload_prompt_only
    config = settings.store_config()
    assert (config.dram_size, config.nvme_path, config.nvme_size) == (1 << 30, None, 0)
    assert config.admission is POLICIES["learned"]
    assert not config.pin_dram
    assert (config.write_down, config.trace_path) == ("late", None)


def test_everything_that_is_set_arrives_in_the_store() -> None:
    settings = _settings(**NVME, codec="zstd", io_lanes=8, load_timeout_s=2, admission="gated")
    config = settings.store_config()
    assert (config.nvme_path, config.nvme_size) == (Path("/nvme/kv"), 1 << 40)
    assert (config.codec, config.io_lanes, config.load_timeout_s) == ("zstd", 8, 2)
    assert isinstance(config.make_policy(), Gated)


def test_a_recording_is_made_where_it_was_asked_for() -> None:
    settings = _settings(trace_path="/var/log/day.trace", trace_bytes="1GiB", write_down="eager")
    config = settings.store_config()
    assert (config.trace_path, config.trace_size) == (Path("/var/log/day.trace"), 1 << 30)
    assert config.write_down == "eager"
    paths = [settings.store_config(replica, 2).trace_path for replica in range(2)]
    assert paths == [Path(f"/var/log/day.trace-replica-{i}") for i in range(2)]
    assert _settings(trace_path="/day").store_config().trace_size == 256 << 20


@pytest.mark.parametrize("path", ["day.trace", "", "~/day", 7, "/nvme/\0"])
def test_a_recording_without_a_place_of_its_own_is_refused(path: object) -> None:
    with pytest.raises(ValueError, match=r"trace_path is .*must be an absolute path"):
        _settings(trace_path=path)
    with pytest.raises(ValueError, match="trace_bytes is '1GiB' without trace_path"):
        _settings(trace_bytes="1GiB")


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_had_by_its_name(name: str) -> None:
    made = _settings(admission=name).store_config().make_policy()
    assert type(made) is type(POLICIES[name]())


def test_a_policy_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="admission is 'belady', must be") as refusal:
        _settings(admission="belady")
    assert all(repr(name) in str(refusal.value) for name in POLICIES)


def test_a_gate_opens_after_as_many_requests_as_were_asked_for() -> None:
    asked = _settings(admission="gated", admission_min_seen=5).store_config().make_policy()
    default = _settings(admission="gated").store_config().make_policy()
    assert [vars(policy)["_min_seen"] for policy in (asked, default)] == [5, 2]


def test_every_store_gets_a_policy_of_its_own() -> None:
    make = _settings(admission="gated").store_config().make_policy
    assert make() is not make()


def test_replicas_do_not_share_a_directory(tmp_path: Path) -> None:
    settings = _settings(nvme_path=str(tmp_path / "kv"), nvme_bytes="1GiB")
    paths = [settings.store_config(replica, 3).nvme_path for replica in range(3)]
    assert paths == [tmp_path / "kv" / f"replica-{i}" for i in range(3)]
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    assert settings.store_config(0, 1).nvme_path == tmp_path / "kv"


def test_a_directory_whose_drive_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    settings = _settings(nvme_path=str(tmp_path / "mount" / "kv"), nvme_bytes="1GiB")
    settings.store_config(0, 2)
    assert list(tmp_path.iterdir()) == []


def test_dram_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match="dram_bytes is missing"):
        Settings.from_extra_config({})


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("dram_byte", "dram_bytes"),
        ("nvme_size_bytes", "nvme_bytes"),
        ("blocksize", "block_size"),
        ("offload_prompts_only", "offload_prompt_only"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_one_that_was_meant(wrong: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong!r}, did you mean {meant!r}"):
        _settings(**{wrong: 1})


@pytest.mark.parametrize(
    "key", ["blocks_per_chunk", "canonical_layout", "cpu_bytes_to_use", "eviction_policy"]
)
def test_keys_of_other_offloading_specs_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"unknown key '{key}'"):
        _settings(**{key: 1})


@given(key=st.text().filter(lambda key: key not in VALID | {"spec_name", "spec_module_path"}))
def test_any_unknown_key_is_named_beside_all_valid_ones(key: str) -> None:
    with pytest.raises(ValueError, match="unknown key") as refusal:
        _settings(**{key: None})
    message = str(refusal.value)
    assert repr(key) in message
    assert all(name in message for name in VALID)


def test_vllms_own_keys_for_the_spec_may_only_repeat_what_the_connector_sets() -> None:
    assert _settings(spec_name=SPEC_NAME, spec_module_path=SPEC_MODULE) == _settings()
    with pytest.raises(ValueError, match="spec_name is 'CPUOffloadingSpec'"):
        _settings(spec_name="CPUOffloadingSpec")
    with pytest.raises(ValueError, match="spec_module_path is 'elsewhere'"):
        _settings(spec_module_path="elsewhere")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("dram_bytes", [0, -1, "0", "-1GiB", "lots", "1 GiBi", 1.5, True, None, float("nan"), []]),
        ("block_size", [0, -256, 256.0, "256", True, []]),
        ("admission", ["never", "LRU", "", True, []]),
        ("write_down", ["later", "", None, True]),
        ("admission_min_seen", [0, -1, 2.0, "2", True]),
        ("codec", ["lz4", "", None, 1, {}]),
        ("io_lanes", [0, 65, 4.0, "4", True, None]),
        ("load_timeout_s", [0, -1, float("nan"), float("inf"), "5", True, None]),
        ("weights_id", ["", "  ", 7, True]),
        ("offload_prompt_only", ["true", 1, 0, None]),
        ("self_describing_kv_events", ["false", 1, None]),
    ],
)
def test_an_impossible_value_is_refused_by_name_with_what_may_be(
    key: str, values: list[object]
) -> None:
    gate = {"admission": "gated"} if key == "admission_min_seen" else {}
    for value in values:
        with pytest.raises(ValueError, match=rf"^{key} is .*must be") as refusal:
            _settings(**gate, **{key: value})
        assert repr(value) in str(refusal.value)


@pytest.mark.parametrize("path", ["relative/kv", "", "~/kv", 7, True, "/nvme/\0"])
def test_a_path_that_means_different_places_in_different_processes_is_refused(path: object) -> None:
    with pytest.raises(ValueError, match=r"nvme_path is .*must be an absolute path"):
        _settings(nvme_path=path, nvme_bytes="1GiB")


@pytest.mark.parametrize("size", [0, "0GiB", -5, "much", True])
def test_a_tier_of_no_size_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match="nvme_bytes is"):
        _settings(nvme_path="/nvme/kv", nvme_bytes=size)


def test_nvme_needs_both_its_path_and_its_size() -> None:
    with pytest.raises(ValueError, match="nvme_path is '/nvme/kv' without nvme_bytes"):
        _settings(nvme_path="/nvme/kv")
    with pytest.raises(ValueError, match="nvme_bytes is '1TiB' without nvme_path"):
        _settings(nvme_bytes="1TiB")


def test_a_threshold_without_a_gate_is_refused() -> None:
    with pytest.raises(ValueError, match="admission_min_seen is 3, which only counts with"):
        _settings(admission_min_seen=3)


KNOBS: dict[str, st.SearchStrategy[Any]] = {
    "dram_bytes": st.integers(1, 1 << 50) | st.sampled_from(["1GiB", "1.5 GB", "64MiB", "7"]),
    "block_size": st.none() | st.integers(1, 4096),
    "codec": st.sampled_from(["raw", "zstd"]),
    "io_lanes": st.integers(1, 64),
    "load_timeout_s": st.floats(0.001, 1e6),
    "weights_id": st.none() | st.text(min_size=1).filter(str.strip),
    "offload_prompt_only": st.booleans(),
    "self_describing_kv_events": st.booleans(),
}


@given(extra=st.fixed_dictionaries({}, optional=KNOBS), nvme=st.booleans())
def test_every_possible_combination_opens(extra: dict[str, Any], nvme: bool) -> None:
    settings = _settings(**extra, **(NVME if nvme else {}))
    for name, value in extra.items():
        assert getattr(settings, name) == value
    assert settings.store_config().dram_size > 0


def test_a_day_of_writes_can_be_bounded() -> None:
    for admission in ("learned", "gated"):
        settings = _settings(**NVME, admission=admission, nvme_bytes_per_day="10TB")
        assert settings.store_config().make_policy() is not settings.store_config().make_policy()
    with pytest.raises(ValueError, match="nvme_bytes_per_day is '10TB' without nvme_path"):
        _settings(nvme_bytes_per_day="10TB")
    with pytest.raises(ValueError, match="only counts with admission"):
        _settings(**NVME, admission="lru", nvme_bytes_per_day="10TB")
    with pytest.raises(ValueError, match="nvme_bytes_per_day is 0"):
        _settings(**NVME, nvme_bytes_per_day=0)
