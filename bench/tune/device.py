"""A stated machine, and what a request costs on it: time to first token with a cache and without.

Every number is an assumption that `--device field=value` replaces. What is not modelled: queueing
and batching (each request is alone), overlap of loading with computing, and decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .models import ModelShape

Tokens = NDArray[np.int64]
Seconds = NDArray[np.float64]

_DAY_S = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One server with NVIDIA H100 SXM GPUs, where nothing else is said.

    gpus: of one tensor-parallel group. Default 1.
    hbm_gb: HBM of each GPU, as its vendor names it: taken as GiB, which is what drivers report
        (80 GB are 81,559 MiB). Default 80; an H200 has 141.
    hbm_gb_s: bandwidth of each GPU's HBM, in 10^9 bytes/s. Default 3350, of the data sheet.
    tflops: of each GPU for dense 16-bit matrices, in 10^12/s. Default 989, of the data sheet.
    mfu: share of tflops that prefill reaches. Default 0.45, an assumption: 0.4 to 0.6 is usual for
        long prompts.
    prefill_tokens_s: tokens/s of a short prompt's prefill on all GPUs together, as measured; 0 to
        estimate it from tflops, mfu and the model's parameters. Default 0.
    link_gb_s: between the host and each GPU, in 10^9 bytes/s. Default 50: PCIe 5 x16 has 63, of
        which large pinned copies are assumed to reach about 80 %.
    dram_gb: of the host that may hold KV, in GiB. Default 512, an assumption.
    dram_latency_us: from a hit in DRAM to its first copy. Default 50, an assumption.
    nvme_drives: that hold the store, striped. Default 1.
    nvme_tb: size of each drive, in 10^12 bytes. Default 7.68, usual for data centres.
    nvme_gb_s: reading speed of each drive, in 10^9 bytes/s. Default 6.5, of a PCIe 4 x4 data sheet.
    nvme_latency_us: from a hit on NVMe to its first bytes. Default 150: flash answers in about 100,
        the rest is assumed for the IO side.
    nvme_dwpd: drive writes per day the drives are rated for. Default 1, read-intensive class.
    write_amplification: bytes written to flash per byte written to the drive. Default 1.1: chunks
        are large and files are recycled whole.
    """

    gpus: int = 1
    hbm_gb: float = 80.0
    hbm_gb_s: float = 3350.0
    tflops: float = 989.0
    mfu: float = 0.45
    prefill_tokens_s: float = 0.0
    link_gb_s: float = 50.0
    dram_gb: float = 512.0
    dram_latency_us: float = 50.0
    nvme_drives: int = 1
    nvme_tb: float = 7.68
    nvme_gb_s: float = 6.5
    nvme_latency_us: float = 150.0
    nvme_dwpd: float = 1.0
    write_amplification: float = 1.1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = _LEAST.get(field.name)
            fine = value > 0 if least is None else value >= least
            if not (fine and value < float("inf")):
                allowed = "above 0" if least is None else f"at least {least}"
                raise ValueError(f"device field {field.name} is {value}, must be {allowed}")
        if self.mfu > 1:
            raise ValueError(f"device field mfu is {self.mfu}, must be at most 1")

    @classmethod
    def parse(cls, overrides: Mapping[str, str]) -> Device:
        """The default machine with some fields replaced; ValueError names a field and its fault."""
        default = cls()
        types = {field.name: type(getattr(default, field.name)) for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in overrides.items():
            if name not in types:
                raise ValueError(f"device has no field {name!r}; it has {', '.join(types)}")
            try:
                values[name] = types[name](text)
            except ValueError:
                kind = "a whole number" if types[name] is int else "a number"
                raise ValueError(f"device field {name} is {text!r}, must be {kind}") from None
        return cls(**values)

    def flops_per_s(self, model: ModelShape) -> float:
        """That prefill of this model reaches on all GPUs together."""
        if self.prefill_tokens_s:
            return self.prefill_tokens_s * model.flops_per_token
        return self.gpus * self.tflops * 1e12 * self.mfu

    def tokens_per_s(self, model: ModelShape) -> float:
        """Prefill of a short prompt, where attention costs next to nothing."""
        return self.flops_per_s(model) / model.flops_per_token

    def pass_s(self, model: ModelShape) -> float:
        """One pass over the weights: no first token comes sooner."""
        return model.weight_bytes / (self.gpus * self.hbm_gb_s * 1e9)

    def link_s_per_token(self, model: ModelShape) -> float:
        """Every GPU copies its own share of the KV at the same time."""
        per_gpu = model.bytes_per_token * model.copies(self.gpus) / self.gpus
        return per_gpu / (self.link_gb_s * 1e9)

    def nvme_s_per_token(self, model: ModelShape) -> float:
        """Into DRAM, from where the link takes it on."""
        return model.bytes_per_token / (self.nvme_drives * self.nvme_gb_s * 1e9)

    def nvme_writes_per_day(self, written_bytes: float, seconds: float) -> float:
        """Drive writes per day of flash, write amplification counted, at so many bytes in so long;
        to be compared with nvme_dwpd."""
        capacity = self.nvme_drives * self.nvme_tb * 1e12
        return written_bytes * self.write_amplification / capacity * _DAY_S / seconds


_LEAST = {
    "gpus": 1,
    "nvme_drives": 1,
    "prefill_tokens_s": 0,
    "dram_latency_us": 0,
    "nvme_latency_us": 0,
    "write_amplification": 1,
}
"""Allowed values, where not all above 0 are."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Estimate:
    """One entry per request, in seconds where not said otherwise.

    ttft_s: time to first token: load, prefill of the rest, one pass over the weights.
    ttft_cold_s: the same without any cache.
    prefill_s, prefill_cold_s: of these, what the GPUs compute.
    load_s: of ttft_s, what loading takes.
    loaded_tokens: tokens whose load paid; at most the hits of DRAM and NVMe.
    """

    ttft_s: Seconds
    ttft_cold_s: Seconds
    prefill_s: Seconds
    prefill_cold_s: Seconds
    load_s: Seconds
    loaded_tokens: Tokens


def estimate(
    device: Device,
    model: ModelShape,
    input_tokens: Tokens,
    hit_tokens_dram: Tokens,
    hit_tokens_nvme: Tokens,
    hit_tokens_hbm: Tokens | None = None,
) -> Estimate:
    """What each request takes: hits lie at the head of the prompt, HBM's first, then DRAM's.

    Loaded are all hits, those of DRAM alone, or none, whichever is fastest: each token further on
    costs no less to compute and no more to load, so no stop between can be better. Hits past
    the last token but one are not counted: an engine computes at least one to answer.
    """
    first = np.zeros_like(input_tokens) if hit_tokens_hbm is None else hit_tokens_hbm
    last = np.maximum(input_tokens - 1, 0)
    hbm = np.minimum(first, last)
    dram = np.minimum(first + hit_tokens_dram, last)
    nvme = np.minimum(first + hit_tokens_dram + hit_tokens_nvme, last)
    speed, fixed_s = device.flops_per_s(model), device.pass_s(model)
    link_s = device.link_s_per_token(model)
    dram_s = np.where(dram > hbm, device.dram_latency_us * 1e-6, 0.0) + (dram - hbm) * link_s
    token_s = link_s + device.nvme_s_per_token(model)
    nvme_s = np.where(nvme > dram, device.nvme_latency_us * 1e-6, 0.0) + (nvme - dram) * token_s
    stops = np.stack([nvme, dram, hbm])
    loads_s = np.stack([dram_s + nvme_s, dram_s, np.zeros_like(dram_s)])
    prefills_s = model.prefill_flops(stops, np.broadcast_to(input_tokens, stops.shape)) / speed
    chosen = np.argmin(loads_s + prefills_s, axis=0)[np.newaxis]
    stop, load_s, prefill_s = (
        np.take_along_axis(a, chosen, axis=0)[0] for a in (stops, loads_s, prefills_s)
    )
    cold_s = model.prefill_flops(np.zeros_like(input_tokens), input_tokens) / speed
    return Estimate(
        ttft_s=load_s + prefill_s + fixed_s,
        ttft_cold_s=cold_s + fixed_s,
        prefill_s=prefill_s,
        prefill_cold_s=cold_s,
        load_s=load_s,
        loaded_tokens=stop - hbm,
    )
