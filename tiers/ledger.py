"""The account of what the IO side was asked to do: jobs under way, the bytes they may still hold
on disk, and the file names they may still change. Whatever is in doubt stays counted."""

from collections.abc import Callable, Iterable

from .io.base import Completion, DeleteJob, FileRef, IoBackend, Job, Status, WriteJob

Name = tuple[int, bytes]
"""A chunk file within its namespace: (generation, key)."""


class Ledger:
    """Jobs go out in one batch per submit(); each is charged from then until it is known done."""

    def __init__(self, io: IoBackend) -> None:
        self._io = io
        self._jobs: dict[int, Job] = {}
        self._outbox: list[Job] = []
        self._charges: dict[int, int] = {}
        self._charged_bytes = 0
        self._changing: set[Name] = set()
        self._doubtful: list[tuple[tuple[FileRef, ...], int]] = []  # files to delete, their charge
        self.next_job_id = 0
        self.leaked_bytes = 0
        """Bytes of files that should be gone and could not be removed."""

    @property
    def charged_bytes(self) -> int:
        """The most that jobs under way, and files in doubt, may hold on disk."""
        return self._charged_bytes

    @property
    def in_flight(self) -> int:
        return len(self._jobs) + len(self._doubtful)

    def count(self, kind: type[Job]) -> int:
        """Jobs of one kind that are under way."""
        return sum(type(job) is kind for job in self._jobs.values())

    @property
    def has_room(self) -> bool:
        """Whether a read or write may be queued; half the queue is kept for deletions."""
        return len(self._jobs) < self._io.max_in_flight // 2 and self._io.alive

    @property
    def idle(self) -> bool:
        """Whether no bytes will come free by waiting."""
        return not self._charges and not self._doubtful

    def is_changing(self, generation: int, key: bytes) -> bool:
        """Whether a job under way may still create or remove this chunk's file."""
        return (generation, key) in self._changing

    def queue(self, make: Callable[[int], Job], charge: int = 0) -> None:
        """Put a job in the next batch; `make` gets its id."""
        job = make(self.next_job_id)
        self.next_job_id += 1
        self._jobs[job.job_id] = job
        self._outbox.append(job)
        self._charges[job.job_id] = charge
        self._charged_bytes += charge
        self._changing.update(_names(job))

    def delete(self, files: Iterable[FileRef], charge: int | None = None) -> None:
        """Delete files that are no longer in any table, charged with their size or `charge`."""
        gone = tuple(files)
        if gone:
            size = sum(file.file_bytes for file in gone) if charge is None else charge
            self.queue(lambda job_id: DeleteJob(job_id, gone), size)

    def submit(self) -> None:
        if self._outbox:
            self._io.submit(self._outbox)
            self._outbox = []

    def poll(self) -> list[tuple[Job, Completion, int]]:
        """What ended since the last call, and the bytes that are no longer charged for it.

        Files that a dead IO side was busy with are deleted as soon as there is a live one, and
        stay charged until then.
        """
        completions = self._io.poll()
        ended = [(job := self._jobs.pop(c.job_id), c, self._settle(job, c)) for c in completions]
        if self._doubtful and self._io.alive:
            doubtful, self._doubtful = self._doubtful, []
            for files, charge in doubtful:
                self._charged_bytes -= charge
                self.delete(files, charge)
        return ended

    def check_integrity(self) -> None:
        doubtful_bytes = sum(charge for _, charge in self._doubtful)
        assert self._charged_bytes == sum(self._charges.values()) + doubtful_bytes
        under_way = {name for job in self._jobs.values() for name in _names(job)}
        in_doubt = {(f.generation, f.key) for files, _ in self._doubtful for f in files}
        assert self._changing == under_way | in_doubt

    def _settle(self, job: Job, done: Completion) -> int:
        charge = self._charges.pop(job.job_id)
        self.leaked_bytes += done.leaked_bytes
        if done.status is Status.UNAVAILABLE and isinstance(job, WriteJob | DeleteJob):
            self._doubtful.append((_files(job), charge))
            return 0
        self._charged_bytes -= charge
        self._changing.difference_update(_names(job))
        return charge


def _files(job: Job) -> tuple[FileRef, ...]:
    """Files that the job may create or remove."""
    match job:
        case WriteJob(meta=meta, victims=victims):
            return (FileRef(meta.namespace, meta.generation, meta.key, 0), *victims)
        case DeleteJob(files=files):
            return files
        case _:
            return ()


def _names(job: Job) -> list[Name]:
    return [(file.generation, file.key) for file in _files(job)]
