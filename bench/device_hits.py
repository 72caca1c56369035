"""Section: a prompt through transformers, computed, hit in DRAM and hit on NVMe.

A random Llama answers the same prompt each time; the page pool in HBM is too small to help. Time is
from the call to the first token. A hit must generate, to the last token, what the model does from a
cache of its own of the same length: equal shapes run equal kernels, so bytes that differ show.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from transformers import DynamicCache

from ..admission.always import Always
from ..connector.dynamic_cache import model_layout
from ..connector.transformers import CachedModel
from ..connector.unsupported import cache_argument
from ..tiers.config import StoreConfig
from .demo_model import DemoModel
from .demo_serving import Answer, answer_cached, answer_uncached
from .device_budget import Part
from .device_model import prompt_of, random_llama
from .device_section import Findings, Row, Site, compared, quotients
from .hit_stores import ServesInPlace
from .timing import interleave

COMPUTED, DRAM, NVME = "computed", "DRAM hit", "NVMe hit"

_SPARE_CHUNKS = 4
_READY_S = 10.0
_LOAD_S = 60.0
"""A slow read is to be measured, not cut short."""
_FLUSH_S = 120.0


def measure(site: Site, part: Part) -> Findings:
    model = random_llama(site)
    prompt = prompt_of(site)
    with (
        tempfile.TemporaryDirectory(prefix=".rootcellar-bench-", dir=site.directory) as name,
        _in_dram(model, prompt) as in_dram,
        _on_nvme(model, prompt, Path(name)) as on_nvme,
    ):
        caches = {DRAM: in_dram, NVME: on_nvme}
        trial = _Trial(model, prompt, caches)
        for number in part.rounds(site.scale.most_rounds):
            trial.run(site.seed + number)
        return Findings(trial.rows(), notes=_notes(caches), wrong=list(trial.wrong()))


@dataclass(frozen=True, slots=True)
class _Served:
    """An answer, and how many tokens of its prompt were not computed for it."""

    answer: Answer
    loaded_tokens: int


@dataclass(slots=True)
class _Trial:
    """The same prompt in all ways by turns; a first time, which warms up, is not counted."""

    model: DemoModel
    prompt: torch.Tensor
    caches: Mapping[str, CachedModel]
    served: dict[str, list[_Served]] = field(default_factory=dict[str, list[_Served]])

    def run(self, seed: int) -> None:
        rivals: dict[str, Callable[[], _Served]] = {COMPUTED: self._compute}
        for name, cached in self.caches.items():
            rivals[name] = partial(self._hit, cached)
        if not self.served:
            for answer in rivals.values():
                answer()
        for name, served in interleave(rivals, 1, seed).items():
            self.served.setdefault(name, []).extend(served)

    def rows(self) -> list[Row]:
        return [self._row(name) for name in self.served]

    def wrong(self) -> Iterator[str]:
        """Hits whose tokens are not those of the model's own cache."""
        expected: dict[int, list[int]] = {}
        for name in self.caches:
            for served in self.served[name]:
                num_tokens = served.loaded_tokens
                if num_tokens not in expected:
                    expected[num_tokens] = _continued(self.model, self.prompt, num_tokens)
                if served.answer.reply != expected[num_tokens]:
                    yield f"tokens of a {name}"

    def _compute(self) -> _Served:
        return _Served(answer_uncached(self.model, self.prompt), 0)

    def _hit(self, cached: CachedModel) -> _Served:
        answer = answer_cached(self.model, cached, self.prompt)
        assert cached.last is not None
        return _Served(answer, self.prompt.shape[1] - cached.last.computed)

    def _row(self, name: str) -> Row:
        taken, computed = (
            [served.answer.ttft_s for served in self.served[way]] for way in (name, COMPUTED)
        )
        return {
            "measured": name,
            "prompt_tokens": self.prompt.shape[1],
            "loaded_tokens": min(served.loaded_tokens for served in self.served[name]),
            "first_token_ms": statistics.median(taken) * 1e3,
            **compared("speedup", quotients(taken, computed)),
        }


@contextmanager
def _in_dram(model: DemoModel, prompt: torch.Tensor) -> Iterator[CachedModel]:
    """Has the prompt in DRAM, and no disk."""
    config = StoreConfig(dram_bytes=_room_bytes(model, prompt), admission=Always)
    with CachedModel(model.model, config, hbm_tokens=1) as cached:
        _wait_ready(cached)
        answer_cached(model, cached, prompt)
        yield cached


@contextmanager
def _on_nvme(model: DemoModel, prompt: torch.Tensor, folder: Path) -> Iterator[CachedModel]:
    """Has the prompt on NVMe, where it stays, hit or not."""
    room_bytes = _room_bytes(model, prompt)
    config = StoreConfig(
        dram_bytes=room_bytes,
        nvme_path=folder,
        nvme_bytes=2 * room_bytes,
        admission=Always,
        write_down="eager",
    )
    with CachedModel(model.model, config, hbm_tokens=1) as cached:
        _wait_ready(cached)
        for _ in range(2):  # the second settles what the first has left under way
            answer_cached(model, cached, prompt)
        if not cached.store.flush(_FLUSH_S):
            raise OSError(f"{folder} takes longer than {_FLUSH_S:.0f} s to write")
    kept = StoreConfig(
        dram_bytes=room_bytes,
        nvme_path=folder,
        nvme_bytes=2 * room_bytes,
        admission=ServesInPlace,
        load_timeout_s=_LOAD_S,
    )
    with CachedModel(model.model, kept, hbm_tokens=1) as cached:
        _wait_ready(cached)
        yield cached


def _room_bytes(model: DemoModel, prompt: torch.Tensor) -> int:
    layout = model_layout(model.model)
    num_chunks = prompt.shape[1] // layout.chunk_tokens + _SPARE_CHUNKS
    return num_chunks * (layout.chunk_bytes + 8192)  # a slot ends with a page, a file has a header


def _wait_ready(cached: CachedModel) -> None:
    """Until DRAM has its memory and, where there is a GPU, has it pinned; some drivers never do."""
    on_gpu = cached.model.device.type == "cuda"
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s:
        dram = cached.store.stats()["dram"]
        touched_bytes = dram["slots_touched"] * dram["slot_bytes"]
        if dram["bytes"] == (dram["bytes_page_locked"] if on_gpu else touched_bytes):
            return
        time.sleep(0.01)


def _continued(model: DemoModel, prompt: torch.Tensor, num_tokens: int) -> list[int]:
    """What the model generates if it has the KV of the first num_tokens from computing it all."""
    cache = DynamicCache(config=model.model.config)
    given = {cache_argument(model.model): cache} | model.arguments(prompt)
    model.model.generate(prompt, **given | {"max_new_tokens": 1})
    cache.crop(num_tokens - prompt.shape[1])  # below zero: how many to take off the end
    tokens = model.model.generate(prompt, **given)
    return [int(token) for token in tokens[0, prompt.shape[1] :]]


def _notes(caches: Mapping[str, CachedModel]) -> list[str]:
    stats = {name: cached.store.stats() for name, cached in caches.items()}
    return [
        f"{name}: {told['dram']['bytes_page_locked']} of {told['dram']['bytes']} bytes of DRAM are"
        f" pinned; runs ended because {', '.join(told['why_not']) or 'all was there'}"
        for name, told in stats.items()
    ]
