"""`vllm serve` as a real process of its own, asked over HTTP."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from .engines import Answer, Prompt, transfer_config, wait_until

# What `vllm serve` runs; the command itself asks for metadata that the CPU build lacks.
SERVE = (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server")
START_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 120.0


class HangUp(Exception):
    """The server was not there, or did not answer to the end."""


class Server:
    """One server at a time on a port of its own; it may be killed and started again."""

    def __init__(
        self, model: Path, extra_config: dict[str, Any] | None, log: Path, *options: str
    ) -> None:
        self._model, self._log, self._port = model, log, _free_port()
        self._command = [
            *(*SERVE, "--model", str(model), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "8192"),
            *("--max-num-batched-tokens", "2048", "--enable-prompt-tokens-details"),
            *options,
        ]
        if extra_config is not None:
            self._command += ["--kv-transfer-config", json.dumps(transfer_config(extra_config))]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Returns when it answers. Its output goes to the log, which is shown if it dies."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                # For /reset_prefix_cache.
                env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"},
                start_new_session=True,
            )
        wait_until(self._is_up, START_TIMEOUT_S)

    def _is_up(self) -> bool:
        assert self.process.poll() is None, f"the server died:\n{self._log.read_text()[-8000:]}"
        try:
            self.call("GET", "/health")
        except HangUp:
            return False
        return True

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        """What the server answers; AssertionError for anything but success."""
        connection = self._connection()
        try:
            connection.request(method, path, *_json(body))
            response = connection.getresponse()
            text = response.read().decode()
        except (OSError, HTTPException) as error:
            raise HangUp(str(error)) from error
        finally:
            connection.close()
        assert response.status == 200, text
        return text

    def ask(self, prompts: Sequence[Prompt], num_tokens: int = 8, **more: Any) -> list[Answer]:
        """One after the other."""
        return [self.ask_one(prompt, num_tokens, **more) for prompt in prompts]

    def ask_one(self, prompt: Prompt, num_tokens: int = 8, **more: Any) -> Answer:
        body = _request(prompt, num_tokens, **more)
        return _answer(json.loads(self.call("POST", "/v1/completions", body)))

    def ask_and_hang_up(self, prompt: Prompt, after_s: float) -> None:
        """A client that asks for a long answer and is gone before it has it."""
        connection = self._connection()
        connection.request("POST", "/v1/completions", *_json(_request(prompt, 4000)))
        time.sleep(after_s)
        connection.close()

    def forget(self) -> None:
        """Empty vLLM's own prefix cache; the store keeps what it has."""
        self.call("POST", "/reset_prefix_cache")

    def forget_when_idle(self) -> None:
        """Requests whose clients are gone take a moment to be aborted."""
        wait_until(lambda: self.metric("vllm:num_requests_running") == 0)
        self.forget()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels, 0 if there are none."""
        found = 0.0
        for line in self.call("GET", "/metrics").splitlines():
            head, _, value = line.rpartition(" ")
            told = dict(re.findall(r'(\w+)="([^"]*)"', head))
            if head.partition("{")[0] == name and labels.items() <= told.items():
                found += float(value)
        return found

    def family(self) -> list[int]:
        """Process ids: the server's, then those of all processes that it or they have started."""
        found = [self.process.pid]
        for pid in found:
            with suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += map(int, (task / "children").read_text().split())
        return found

    def _connection(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL to the server and all of vLLM's processes at once, as an OOM killer or a
        container's end may do. Our IO worker, if any, has to find out for itself."""
        pids = [pid for pid in self.family() if not is_io_worker(pid)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM, as an operator does it; SIGKILL to whatever is left of a server that hangs."""
        if self.process.poll() is None:
            family = self.family()
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            finally:
                for pid in filter(is_running, family):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


@contextmanager
def server(
    model: Path, extra_config: dict[str, Any] | None, log: Path, *options: str
) -> Iterator[Server]:
    running = Server(model, extra_config, log, *options)
    try:
        running.start()
        yield running
    finally:
        running.stop()


def is_io_worker(pid: int) -> bool:
    try:
        return b"rootcellar" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def is_running(pid: int) -> bool:
    """A zombie is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def _request(prompt: Prompt, num_tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a greedy /v1/completions request whose answer tells token ids."""
    return {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        **more,
    }


def _answer(body: dict[str, Any]) -> Answer:
    (choice,) = body["choices"]
    details = body["usage"]["prompt_tokens_details"] or {}
    return Answer(
        tokens=tuple(choice["token_ids"]),
        logprobs=tuple(choice["logprobs"]["token_logprobs"]),
        cached=details.get("cached_tokens") or 0,
    )


def _json(body: dict[str, Any] | None) -> tuple[str | None, dict[str, str]]:
    """(body, headers) of a request."""
    if body is None:
        return None, {}
    return json.dumps(body), {"Content-Type": "application/json"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
