"""Many copies between device and pinned memory in one call of the driver (cuMemcpyBatchAsync)."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.int64]

_ABI = 12080
"""The CUDA version whose signature of the call is declared here; later drivers keep it."""
_STREAM_ORDERED = 1
_OVERLAP_WITH_COMPUTE = 1


@dataclass(frozen=True, slots=True)
class Spans:
    """sizes_bytes[i] bytes from sources[i] to targets[i], which all are addresses.

    Each array lies together. No target overlaps another, or a source.
    """

    sources: Addresses
    targets: Addresses
    sizes_bytes: Addresses


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    def __init__(self, address: int) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        signature = ctypes.CFUNCTYPE(
            ctypes.c_int,
            *(pointer, pointer, pointer, size),  # targets, sources, sizes, how many
            *(pointer, pointer, size),  # attributes, where each begins to apply, how many
            *(pointer, pointer),  # index of what failed, stream
        )
        self._call = signature(address)
        self._attributes = _Attributes(_STREAM_ORDERED, flags=_OVERLAP_WITH_COMPUTE)

    @classmethod
    def find(cls) -> "BatchCopy | None":
        """None where the driver is too old, or absent."""
        try:
            resolve = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
        except (OSError, AttributeError):
            return None
        address, found = ctypes.c_void_p(), ctypes.c_int()
        flags = ctypes.c_uint64(0)
        code = resolve(
            b"cuMemcpyBatchAsync", ctypes.byref(address), _ABI, flags, ctypes.byref(found)
        )
        return cls(address.value) if code == 0 and address.value else None

    def copy(self, spans: Spans, stream: int) -> None:
        """Launch all copies, in no order, on a stream that is not CUDA's default one. RuntimeError
        if refused; some may be launched then.

        The driver has read the arrays when this returns.
        """
        if not len(spans.sizes_bytes):
            return  # which the driver would refuse
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._call(
            spans.targets.ctypes.data,
            spans.sources.ctypes.data,
            spans.sizes_bytes.ctypes.data,
            len(spans.sizes_bytes),
            ctypes.byref(self._attributes),
            ctypes.byref(first),
            1,
            ctypes.byref(failed),
            stream,
        )
        if code != 0:
            raise RuntimeError(f"cuMemcpyBatchAsync failed with error {code} at {failed.value}")
