"""The demo, and the main job in small: conversations served from HBM, DRAM and NVMe, next to the
same model without a cache; then the store is opened again by a new process.

    report = run(on_row=print)

Every request is answered twice, and every token compared. The page pool holds about a quarter of
what is said, DRAM half, NVMe all of it, so that all three tiers have to serve.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ..connector.dynamic_cache import model_layout
from ..connector.transformers import CachedModel
from ..tiers.config import StoreConfig
from ..tiers.layout import KVLayout
from .demo_model import DemoModel, load_model
from .demo_report import Row, report_of
from .demo_serving import answer_cached, answer_uncached
from .demo_workload import Workload, file_workload, shipped_workload

OnRow = Callable[[Row], None]
OnStep = Callable[[str], None]

_RESTARTED_REQUESTS = 4
_MIN_HBM_TOKENS = 512
_MIN_DRAM_CHUNKS = 4


def run(
    model: str | None = None,
    sessions: Path | None = None,
    hbm_tokens: int | None = None,
    store: Path | None = None,
    on_row: OnRow = lambda row: None,
    on_step: OnStep = lambda step: None,
) -> dict[str, Any]:
    """Serve the workload and report; `report["outputs_identical"]` must be true.

    model: path or name of a causal language model with its tokenizer; None makes a small one.
    sessions: JSON lines of {"input": …}; None takes the conversations shipped with the project.
    hbm_tokens: size of the page pool; None makes it a quarter of the workload.
    store: directory of the store, kept; None uses a temporary one.
    on_row: told every request as it is served. on_step: told what goes on meanwhile.
    """
    with ExitStack() as stack:
        if store is None:
            temporary = tempfile.TemporaryDirectory(prefix="rootcellar-demo-")
            store = Path(stack.enter_context(temporary))
        on_step("loading the model")
        demo_model = load_model(model)
        workload = _workload(demo_model, sessions)
        layout = model_layout(demo_model.model)
        budgets = _budgets(layout, workload, hbm_tokens)
        budgets["nvme_bytes"] += _bytes_below(store)  # what is there already stays there
        rows, exchanges = _serve(demo_model, workload, budgets, store, on_row, on_step)
        on_step("opening the store again in a new process")
        spec = {"model": model, "store": str(store), "budgets": budgets}
        restart = _restart(spec | {"exchanges": exchanges[-_RESTARTED_REQUESTS:]})
    return report_of(rows, restart) | {
        "model": demo_model.name,
        "budgets": budgets,
        "notes": workload.notes,
    }


def store_config(store: str | Path, budgets: dict[str, int]) -> StoreConfig:
    return StoreConfig(
        dram_bytes=budgets["dram_bytes"], nvme_path=store, nvme_bytes=budgets["nvme_bytes"]
    )


def _workload(demo_model: DemoModel, sessions: Path | None) -> Workload:
    if sessions is None:
        return shipped_workload(demo_model.encode)
    return file_workload(sessions, demo_model.encode, demo_model.max_prompt_tokens)


def _budgets(layout: KVLayout, workload: Workload, hbm_tokens: int | None) -> dict[str, int]:
    """A quarter of the workload in HBM, half in DRAM, and room for all of it on NVMe.

    DRAM holds the longest prompt at least: what does not fit in one piece is not stored whole.
    """
    distinct = workload.distinct_tokens(layout.chunk_tokens)
    dram_tokens = max(distinct // 2, workload.longest_prompt())
    dram_chunks = max(_MIN_DRAM_CHUNKS, dram_tokens // layout.chunk_tokens + 1)
    nvme_chunks = 4 * distinct // layout.chunk_tokens + 64
    if hbm_tokens is None:
        hbm_tokens = max(_MIN_HBM_TOKENS, distinct // 4)
    return {
        "hbm_tokens": hbm_tokens,
        "dram_bytes": dram_chunks * _slot_bytes(layout),
        "nvme_bytes": nvme_chunks * _slot_bytes(layout),
    }


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _slot_bytes(layout: KVLayout) -> int:
    """Upper bound of what a chunk takes in a tier: its payload in whole pages and a header."""
    return -(-layout.chunk_bytes // 4096) * 4096 + 4096


def _serve(
    demo_model: DemoModel,
    workload: Workload,
    budgets: dict[str, int],
    store: Path,
    on_row: OnRow,
    on_step: OnStep,
) -> tuple[list[Row], list[dict[str, list[int]]]]:
    """Answer every turn without and with the cache; also prompts and uncached replies, to redo."""
    rows: list[Row] = []
    exchanges: list[dict[str, list[int]]] = []
    spoken: dict[str, list[int]] = {}
    config = store_config(store, budgets)
    with CachedModel(demo_model.model, config, hbm_tokens=budgets["hbm_tokens"]) as cached:
        on_step("warming up")
        _warm_up(demo_model, cached)
        for turn in workload.turns:
            on_step(f"serving {turn.label}")
            said = [*spoken.get(turn.conversation, []), *turn.tokens]
            said = said[: demo_model.max_prompt_tokens]
            prompt = torch.tensor([said], device=demo_model.model.device)
            uncached = answer_uncached(demo_model, prompt)
            served = answer_cached(demo_model, cached, prompt)
            spoken[turn.conversation] = said + uncached.reply
            exchanges.append({"prompt": said, "reply": uncached.reply})
            rows.append(Row.of(turn.label, uncached, served, cached.last))
            on_row(rows[-1])
        on_step("writing down to NVMe")
    return rows, exchanges


def _warm_up(demo_model: DemoModel, cached: CachedModel) -> None:
    """The first calls allocate and choose kernels. Too short for a chunk: nothing is stored."""
    device = demo_model.model.device
    prompt = torch.zeros((1, min(200, demo_model.max_prompt_tokens)), dtype=torch.long).to(device)
    for _ in range(2):
        answer_uncached(demo_model, prompt)
        answer_cached(demo_model, cached, prompt, salt="warm-up")


def _restart(spec: dict[str, Any]) -> dict[str, Any]:
    """What a new process with empty HBM and DRAM finds in the store."""
    # -P: a checkout as current directory must not stand in for installed packages.
    command = [sys.executable, "-P", "-m", f"{__package__}.demo_restart"]
    done = subprocess.run(command, input=json.dumps(spec), stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the new process ended with exit code {done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))
