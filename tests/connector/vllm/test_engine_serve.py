"""`vllm serve` over HTTP: hits after the cache is reset and after a restart, and what it tells."""

import re
import subprocess
import sys
from pathlib import Path

from .engines import assert_same, plain, store, tokens, wait_until, whole_chunks
from .servers import Server, server

PROMPTS = [tokens(2000), tokens(1000, seed=1)]
WANTED = [whole_chunks(len(prompt)) for prompt in PROMPTS]


def test_served_over_http_warm_and_restarted_answers_equal_those_of_vllm_alone(
    llama: Path, tmp_path: Path
) -> None:
    expected = plain(llama, PROMPTS)
    with server(llama, store(tmp_path / "kv", write_down="eager"), tmp_path / "log") as served:
        cold = served.ask(PROMPTS)
        wait_until(lambda: served.metric("rootcellar:stored_chunks_total") == 10)
        served.forget()
        warm = served.ask(PROMPTS)
        _wait_for_hits(served, dram=sum(WANTED), nvme=0)
        wait_until(lambda: served.metric("rootcellar:writes_pending") == 0)
        assert served.metric("rootcellar:nvme_written_bytes_total") >= 10 * 256 * 1024
        assert served.metric("rootcellar:load_seconds_count") == len(PROMPTS)
        served.stop()
        served.start()
        restarted = served.ask(PROMPTS)
        _wait_for_hits(served, dram=0, nvme=sum(WANTED))
        _disconnect(served, rounds=40)
        _run_client(served)
        assert_same(served.ask(PROMPTS), expected)
    for answers in (cold, warm, restarted):
        assert_same(answers, expected)
    assert [answer.cached for answer in warm] == WANTED
    assert [answer.cached for answer in restarted] == WANTED


def _wait_for_hits(served: Server, **wanted: int) -> None:
    """An idle engine tells its last numbers within a moment."""
    wait_until(
        lambda: (
            wanted
            == {tier: served.metric("rootcellar:hit_tokens_total", tier=tier) for tier in wanted}
        )
    )


def _disconnect(served: Server, rounds: int) -> None:
    """Clients that hang up, some before their request runs, some while it loads or decodes."""
    for turn in range(rounds):
        if turn % 4 == 0:
            served.forget_when_idle()
        served.ask_and_hang_up(PROMPTS[turn % 2], after_s=0.001 * (turn % 20))
    wait_until(lambda: served.metric("vllm:num_requests_running") == 0)
    wait_until(lambda: served.metric("rootcellar:pinned_slots") == 0)
    assert served.metric("rootcellar:open_loads") == 0


def _run_client(served: Server) -> None:
    """The one in examples/vllm."""
    client = Path(__file__).parents[3] / "examples" / "vllm" / "client.py"
    told = subprocess.run(
        [sys.executable, "-P", str(client), served.url], capture_output=True, text=True, check=True
    ).stdout
    first, second = [int(count) for count in re.findall(r"(\d+) of \d+ prompt tokens", told)]
    assert first == 0
    assert second > 2000
