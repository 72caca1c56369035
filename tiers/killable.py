"""A toy store in a process of its own, for tests that kill it, or its IO worker, for real."""

import contextlib
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path as FilePath
from typing import Any

from .config import IoKind, StoreConfig
from .store import TieredStore
from .toy import (
    CHUNK_BYTES,
    FILE_BYTES,
    NAMESPACE,
    Path,
    bytes_of,
    chunks_of,
    keys_of,
)

NVME_CHUNKS = 10


def _open(root: FilePath, io: IoKind) -> TieredStore:
    config = StoreConfig(
        dram_bytes=4 * CHUNK_BYTES,
        nvme_path=root,
        nvme_bytes=NVME_CHUNKS * FILE_BYTES,
        io=io,
        io_lanes=2,
    )
    return TieredStore(config, NAMESPACE)


def serve(root: FilePath, io: IoKind, calls: Connection) -> None:
    """Runs in a child: opens the store and answers (verb, argument) until it is killed."""
    with _open(root, io) as store:
        while True:
            verb, argument = calls.recv()
            calls.send(_answer(store, verb, argument))


def _answer(store: TieredStore, verb: str, chain: Path) -> Any:
    match verb:
        case "put":
            return store.put(keys_of(chain), chunks_of(chain))
        case "offer":  # returns with writes under way
            job = store.prepare_store(keys_of(chain))
            for index, view in zip(job.wanted, store.store_views(job), strict=True):
                view.copy_(chunks_of(chain)[index])
            store.complete_store(job)
        case "start a load":  # returns with reads under way
            store.prepare_load(keys_of(chain))
        case "get":
            return [bytes_of(tensor) for tensor in store.get(keys_of(chain))]
        case "flush":
            return store.flush()
        case "invalidate":
            store.invalidate()
        case "stats":
            store.check_integrity()
            return store.stats()
        case _:
            raise AssertionError(verb)
    return None


class KillableStore:
    """A store in a process of its own, killed at will and started again on the same directory."""

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rootcellar.tiers.killable"])

    def __init__(self, root: FilePath, io: IoKind) -> None:
        self.root, self.io = root, io
        self.start()

    def start(self) -> None:
        self.calls, other = self.context.Pipe()
        arguments = (self.root, self.io, other)
        self.process = self.context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        other.close()

    def ask(self, verb: str, chain: Path = ()) -> Any:
        self.calls.send((verb, chain))
        return self.calls.recv()

    def workers(self) -> list[int]:
        pid = self.process.pid
        tasks = FilePath(f"/proc/{pid}/task")
        return [int(child) for task in tasks.iterdir() for child in _words(task / "children")]

    def kill_worker(self) -> None:
        for worker in self.workers():
            with contextlib.suppress(ProcessLookupError):  # one killed before may go meanwhile
                os.kill(worker, signal.SIGKILL)

    def kill(self) -> None:
        workers = self.workers()
        self.process.kill()
        self.process.join()
        self.calls.close()
        deadline_s = time.monotonic() + 10
        while any(map(_runs, workers)):
            assert time.monotonic() < deadline_s, "a worker outlived the owner of the store"
            time.sleep(0.01)


def _words(file: FilePath) -> list[str]:
    return file.read_text().split()


def _runs(pid: int) -> bool:
    status = FilePath(f"/proc/{pid}/stat")
    return status.exists() and _words(status)[2] != "Z"
