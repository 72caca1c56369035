import inspect
import re
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rootcellar.bench.tune.device import Device, Estimate, estimate
from rootcellar.bench.tune.models import ModelShape, kv_shape

LLAMA = kv_shape("llama-3.1-8b")
GEMMA = kv_shape("gemma-3-27b")


def tokens(*counts: int) -> NDArray[np.int64]:
    return np.array(counts, np.int64)


def brute_force(
    device: Device, model: ModelShape, total: int, hbm: int, dram: int, nvme: int
) -> float:
    """The least seconds of load and prefill over every single stop of the load."""
    best = float("inf")
    for stop in range(hbm, min(hbm + dram + nvme, total - 1) + 1):
        from_dram = min(stop, hbm + dram) - hbm
        from_nvme = stop - hbm - from_dram
        load_s = (from_dram + from_nvme) * device.link_s_per_token(model)
        load_s += from_nvme * device.nvme_s_per_token(model)
        load_s += device.dram_latency_us * 1e-6 if from_dram else 0.0
        load_s += device.nvme_latency_us * 1e-6 if from_nvme else 0.0
        flops = float(model.prefill_flops(tokens(stop), tokens(total))[0])
        best = min(best, load_s + flops / device.flops_per_s(model))
    return best


@given(
    st.integers(1, 400),
    st.integers(0, 50),
    st.integers(0, 200),
    st.integers(0, 200),
    st.floats(0.05, 50),
    st.floats(0.05, 50),
    st.sampled_from([LLAMA, GEMMA]),
)
def test_the_load_ends_where_no_other_stop_is_faster(
    total: int,
    hbm: int,
    dram: int,
    nvme: int,
    link_gb_s: float,
    nvme_gb_s: float,
    model: ModelShape,
) -> None:
    hbm = min(hbm, total - 1)
    device = Device(link_gb_s=link_gb_s, nvme_gb_s=nvme_gb_s, nvme_latency_us=3000)
    found = estimate(device, model, tokens(total), tokens(dram), tokens(nvme), tokens(hbm))
    expected = brute_force(device, model, total, hbm, dram, nvme)
    assert found.ttft_s[0] - device.pass_s(model) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert 0 <= found.loaded_tokens[0] <= dram + nvme
    assert found.ttft_s[0] <= found.ttft_cold_s[0] + 1e-12


def test_a_slow_tier_is_not_read_and_costs_nothing() -> None:
    device = Device(nvme_gb_s=0.1)
    total, dram = tokens(8192), tokens(4096)
    with_nvme = estimate(device, LLAMA, total, dram, tokens(2048))
    without = estimate(device, LLAMA, total, dram, tokens(0))
    assert with_nvme.loaded_tokens[0] == 4096
    assert with_nvme.ttft_s[0] == without.ttft_s[0]


def test_without_hits_the_cache_changes_nothing() -> None:
    total = tokens(0, 1, 1000, 100_000)
    found = estimate(Device(), LLAMA, total, tokens(0, 0, 0, 0), tokens(0, 0, 0, 0))
    assert np.array_equal(found.ttft_s, found.ttft_cold_s)
    assert not found.load_s.any()
    assert (np.diff(found.ttft_s) > 0).all()


def test_the_last_token_is_always_computed() -> None:
    found = estimate(Device(), LLAMA, tokens(1000), tokens(0), tokens(0), tokens(1000))
    assert found.prefill_s[0] > 0
    assert found.load_s[0] == 0
    loaded = estimate(Device(), LLAMA, tokens(1024), tokens(512), tokens(512))
    assert loaded.loaded_tokens[0] == 1023


def test_every_part_of_an_estimate_has_one_entry_per_request() -> None:
    found = estimate(Device(), LLAMA, tokens(10, 600), tokens(0, 256), tokens(0, 0))
    for field in fields(Estimate):
        assert getattr(found, field.name).shape == (2,), field.name
    rebuilt = found.load_s + found.prefill_s + Device().pass_s(LLAMA)
    assert found.ttft_s == pytest.approx(rebuilt)


def test_a_measured_prefill_speed_replaces_the_assumed_one() -> None:
    assumed = Device()
    assert assumed.tokens_per_s(LLAMA) == pytest.approx(989e12 * 0.45 / LLAMA.flops_per_token)
    measured = Device(prefill_tokens_s=10_000, gpus=4)
    assert measured.tokens_per_s(LLAMA) == pytest.approx(10_000)
    short = estimate(measured, LLAMA, tokens(10), tokens(0), tokens(0))
    assert short.prefill_s[0] == pytest.approx(10 / 10_000, rel=1e-3)


def test_gpus_share_the_work_and_the_links_but_not_a_latent() -> None:
    one, eight = Device(), Device(gpus=8)
    assert eight.flops_per_s(LLAMA) == 8 * one.flops_per_s(LLAMA)
    assert eight.link_s_per_token(LLAMA) == pytest.approx(one.link_s_per_token(LLAMA) / 8)
    latent = kv_shape("deepseek-v3")
    assert eight.link_s_per_token(latent) == one.link_s_per_token(latent)
    assert eight.nvme_s_per_token(latent) == one.nvme_s_per_token(latent)


def test_drive_writes_per_day_are_those_of_the_arithmetic_on_paper() -> None:
    """184,812 chunks of 64 MiB in 59 minutes, on one drive of 7.68 TB."""
    device = Device(write_amplification=1.0)
    assert device.nvme_writes_per_day(184_812 * 64 * 2**20, 59 * 60) == pytest.approx(39.4, abs=0.1)
    worn = replace(device, write_amplification=1.5, nvme_drives=3)
    assert worn.nvme_writes_per_day(7.68e12, 86_400) == pytest.approx(0.5)


def test_fields_are_replaced_by_name() -> None:
    device = Device.parse({"gpus": "8", "hbm_gb": "141", "nvme_gb_s": "14.2"})
    assert device == Device(gpus=8, hbm_gb=141.0, nvme_gb_s=14.2)
    assert Device.parse({}) == Device()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"gpu": "8"}, "no field 'gpu'; it has gpus, hbm_gb"),
        ({"gpus": "many"}, "gpus is 'many', must be a whole number"),
        ({"gpus": "1.5"}, "gpus is '1.5', must be a whole number"),
        ({"gpus": "0"}, "gpus is 0, must be at least 1"),
        ({"link_gb_s": ""}, "link_gb_s is '', must be a number"),
        ({"link_gb_s": "0"}, "link_gb_s is 0.0, must be above 0"),
        ({"nvme_gb_s": "nan"}, "nvme_gb_s is nan"),
        ({"tflops": "inf"}, "tflops is inf"),
        ({"mfu": "1.1"}, "mfu is 1.1, must be at most 1"),
        ({"write_amplification": "0.5"}, "write_amplification is 0.5, must be at least 1"),
        ({"prefill_tokens_s": "-1"}, "prefill_tokens_s is -1.0, must be at least 0"),
    ],
)
def test_a_wrong_field_or_value_is_named(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Device.parse(overrides)


def test_every_field_is_explained_with_its_default() -> None:
    default, text = Device(), inspect.getdoc(Device) or ""
    for field in fields(Device):
        said = re.search(rf"^{field.name}: (.*?)(^\w+: |\Z)", text, re.M | re.S)
        assert said, field.name
        assert f"Default {getattr(default, field.name):g}" in " ".join(said[1].split()), field.name
