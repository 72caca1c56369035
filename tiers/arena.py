"""Fixed-size slots in shared memory: a memfd that every process which needs it maps.

Nothing has a name in a file system, so nothing is left behind when the owner is killed.
"""

import ctypes
import errno
import mmap
import os
import threading
from dataclasses import dataclass

from .errors import TierError
from .numa import prefer_node

PAGE_BYTES = 4096
STEP_BYTES = 64 << 20
"""Memory populated per system call; close() waits for at most one step."""

_NAME = "rootcellar-arena"
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)  # its calls run without the interpreter lock
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class ArenaMapping:
    """A view of an arena's slots; `fd` stays its creator's.

    After close(), memory that something else still views is unmapped when the last view is gone.
    """

    def __init__(self, fd: int, slot_bytes: int, num_slots: int) -> None:
        self.fd = fd
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._map = mmap.mmap(fd, slot_bytes * num_slots)
        self.buffer = memoryview(self._map)
        """All slots, one after the other."""
        self.pinned_slots = 0
        """Slots [0, pinned_slots) are page-locked for CUDA in this process; its pinner's to set."""

    def slot(self, index: int) -> memoryview:
        """The slot_bytes writable bytes of one slot."""
        if not 0 <= index < self.num_slots:
            raise IndexError(f"slot is {index}, must be from 0 to {self.num_slots - 1}")
        start = index * self.slot_bytes
        return self.buffer[start : start + self.slot_bytes]

    @property
    def address(self) -> int:
        """Of the first slot in this process; page-aligned."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        try:
            self.buffer.release()
            self._map.close()
        except BufferError:
            pass  # tensors still view it: unmapping now would crash whoever touches them


@dataclass(frozen=True, slots=True)
class ArenaAddress:
    """Where another process of the same user finds an arena: descriptor `fd` of process `pid`.

    Good while that process has the arena open. May be pickled.
    """

    pid: int
    fd: int
    slot_bytes: int
    num_slots: int

    def attach(self) -> ArenaMapping:
        """Map the slots; the caller closes the mapping. TierError when they cannot be reached."""
        path = f"/proc/{self.pid}/fd/{self.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TierError(
                f"the arena of process {self.pid} cannot be opened ({error}); its process must be"
                " alive, of the same user and in the same PID namespace"
            ) from error
        try:
            self._check(path, fd)
            mapping = ArenaMapping(fd, self.slot_bytes, self.num_slots)
            mapping.fd = -1  # the memory stays mapped without it
            return mapping
        except OSError as error:
            raise TierError(f"the arena at {path} cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def _check(self, path: str, fd: int) -> None:
        """Another process may have the number by now, or in another PID namespace."""
        size_bytes, expected_bytes = os.fstat(fd).st_size, self.slot_bytes * self.num_slots
        name = os.readlink(f"/proc/self/fd/{fd}")
        if not name.startswith(f"/memfd:{_NAME}") or size_bytes != expected_bytes:
            raise TierError(
                f"{path} is {name} of {size_bytes} bytes, not an arena of {expected_bytes}: its"
                " owner has closed it, or lives in another PID namespace"
            )


class SharedArena(ArenaMapping):
    """Creates the memory and populates it in the background; only touched slots may be used.

    The first step is populated before the constructor returns, so a small arena is ready at once.
    numa_node: where its memory is to come from, if that has room; None for no preference.
    """

    def __init__(self, slot_bytes: int, num_slots: int, numa_node: int | None = None) -> None:
        if slot_bytes <= 0 or slot_bytes % PAGE_BYTES:
            raise ValueError(f"slot_bytes is {slot_bytes}, must be a multiple of {PAGE_BYTES}")
        if num_slots <= 0:
            raise ValueError(f"num_slots is {num_slots}, must be at least 1")
        fd = os.memfd_create(_NAME)
        try:
            os.ftruncate(fd, slot_bytes * num_slots)
            super().__init__(fd, slot_bytes, num_slots)
        except BaseException:
            os.close(fd)
            raise
        if numa_node is not None:  # before the first touch: what is populated stays where it is
            prefer_node(numa_node, self.address, slot_bytes * num_slots)
        self.touched_slots = 0
        """Slots [0, touched_slots) may be used; only grows."""
        self.populate_error: OSError | None = None
        """Why no more slots will come, if the machine refused memory."""
        self._grown = threading.Condition()
        self._closing = False
        self._populate_step()
        self._thread: threading.Thread | None = None
        if not self._settled:
            self._thread = threading.Thread(
                target=self._populate, name="rootcellar-populate", daemon=True
            )
            self._thread.start()

    @staticmethod
    def attach(fd: int, slot_bytes: int, num_slots: int) -> ArenaMapping:
        """The same slots, in a process that inherited `fd`."""
        return ArenaMapping(fd, slot_bytes, num_slots)

    @property
    def shared_at(self) -> ArenaAddress:
        """Where another process finds it, until close()."""
        return ArenaAddress(os.getpid(), self.fd, self.slot_bytes, self.num_slots)

    def wait_touched(self, num_slots: int, timeout_s: float) -> bool:
        """Block until `num_slots` slots may be used; False when they are not there in time."""
        with self._grown:
            self._grown.wait_for(
                lambda: self.touched_slots >= num_slots or self._settled, timeout_s
            )
        return self.touched_slots >= num_slots

    def close(self) -> None:
        """Release the memory. Idempotent; views that others hold stay valid."""
        self._closing = True
        if self._thread is not None:
            self._thread.join()  # it works on a raw address, which must stay mapped until it ends
            self._thread = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        super().close()

    @property
    def growing(self) -> bool:
        """Whether more slots will come."""
        return not self._settled

    @property
    def _settled(self) -> bool:
        """Whether touched_slots will not grow any more."""
        ended = self._closing or self.populate_error is not None
        return ended or self.touched_slots == self.num_slots

    def _populate(self) -> None:
        while not self._settled:
            self._populate_step()

    def _populate_step(self) -> None:
        step = max(1, STEP_BYTES // self.slot_bytes)
        stop = min(self.num_slots, self.touched_slots + step)
        try:
            self._touch(self.touched_slots * self.slot_bytes, stop * self.slot_bytes)
        except OSError as error:
            self.populate_error = error
            stop = self.touched_slots
        with self._grown:
            self.touched_slots = stop
            self._grown.notify_all()

    def _touch(self, start: int, stop: int) -> None:
        """Give bytes [start, stop) their memory. Raises OSError when there is none."""
        while _libc.madvise(self.address + start, stop - start, _MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # a kernel older than 5.14: allocate without mapping
                return os.posix_fallocate(self.fd, start, stop - start)
            if code not in (errno.EINTR, errno.EAGAIN):
                raise OSError(code, os.strerror(code))
