"""What the store tells its policy and its recorder of requests, and how it outlives the process."""

from ..admission.base import AdmissionPolicy, Chain
from .admission_file import AdmissionFile
from .trace_recorder import TraceRecorder

SAVE_EVERY_S = 60.0


class Learning:
    """Of the engine's thread; files are written by threads of their own.

    file: None keeps nothing. recorder: None records nothing.
    """

    def __init__(
        self,
        policy: AdmissionPolicy,
        file: AdmissionFile | None,
        recorder: TraceRecorder | None,
        chunk_tokens: int,
    ) -> None:
        self._policy = policy
        self._file = file
        self._recorder = recorder
        self._chunk_tokens = chunk_tokens
        self._changed = False
        self._save_at_s = 0.0  # never before something was observed
        if file is not None and (data := file.read()):
            policy.restore(data)

    def observe(self, chain: Chain, now_s: float, num_tokens: int | None) -> None:
        self._policy.observe(chain, now_s)
        if self._recorder is not None:
            whole_chunks = len(chain) * self._chunk_tokens
            self._recorder.record(chain, now_s, whole_chunks if num_tokens is None else num_tokens)
        if not self._changed:
            self._changed, self._save_at_s = True, now_s + SAVE_EVERY_S

    def save_if_due(self, now_s: float) -> None:
        if self._changed and now_s >= self._save_at_s:
            self._save()

    def close(self) -> None:
        """Waits for the files."""
        self._save()
        for file in (self._file, self._recorder):
            if file is not None:
                file.close()

    @property
    def dropped_requests(self) -> int:
        """Requests that are not in the recording."""
        return 0 if self._recorder is None else self._recorder.dropped

    def _save(self) -> None:
        if self._changed and self._file is not None and (data := self._policy.save()):
            self._file.write_soon(data)
        self._changed = False
