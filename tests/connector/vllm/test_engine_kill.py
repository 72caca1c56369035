"""SIGKILL while chunks are being stored: the next start serves right answers and cleans up."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from rootcellar.tiers.inspect import inspect_store
from rootcellar.tiers.toy import chunk_files

from .engines import Prompt, assert_same, plain, store, tokens, wait_until
from .servers import HangUp, Server, is_running, server

PROMPTS = [tokens(3000, seed=seed) for seed in range(8)]
KILLS = 3


def test_killed_during_stores_it_leaks_nothing_and_serves_right_answers_after(
    llama: Path, tmp_path: Path
) -> None:
    expected = plain(llama, PROMPTS)
    rng, root = random.Random(0), tmp_path / "kv"
    with server(llama, store(root, nvme="64MiB", write_down="eager"), tmp_path / "log") as served:
        for kill in range(KILLS):
            _kill_while_storing(served, root, PROMPTS[kill * 2 : kill * 2 + 4], rng)
            served.start()
            found = inspect_store(root)
            assert found["temporary_bytes"] == 0
            assert found["bytes"] <= 64 * 2**20
            known = kill * 2 + 2
            assert_same(served.ask(PROMPTS[:known]), expected[:known])
        wait_until(lambda: served.metric("rootcellar:hit_tokens_total", tier="nvme") > 0)
        assert served.metric("rootcellar:corrupt_chunks_total") == 0


def _kill_while_storing(
    served: Server, root: Path, prompts: list[list[int]], rng: random.Random
) -> None:
    before = len(chunk_files(root))
    with ThreadPoolExecutor() as clients:
        for prompt in prompts:
            clients.submit(_ask_the_dying, served, prompt)
        wait_until(lambda: len(chunk_files(root)) > before)
        time.sleep(rng.random() * 0.05)
        family = served.family()
        served.kill()
    # The arena is gone with the last process that has it mapped.
    wait_until(lambda: not any(map(is_running, family)))
    names = [path.name for path in Path("/dev/shm").iterdir()]
    # Ours, or those of vLLM's own offloading.
    assert not [name for name in names if "rootcellar" in name or "offload" in name]


def _ask_the_dying(served: Server, prompt: Prompt) -> None:
    with suppress(HangUp):
        served.ask_one(prompt)
