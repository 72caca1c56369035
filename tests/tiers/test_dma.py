"""The driver's batched copy, against a C function that stands in for it and does the copies."""

import ctypes
import struct

import numpy as np
import pytest

from rootcellar.tiers.dma import BatchCopy, Spans

STREAM = 0x5EED
SIGNATURE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.POINTER(ctypes.c_uint64),) * 2,
    *(ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t),
    *(ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p),
)
ATTRIBUTES = struct.Struct("=iiiiiI")
"""CUmemcpyAttributes: source order, two locations of type and id, flags."""


class Driver:
    """cuMemcpyBatchAsync as cuda.h of 12.8 declares it, in the order of its arguments."""

    def __init__(self, code: int = 0) -> None:
        self.calls = list[tuple[int, ...]]()
        self._code = code
        self._function = SIGNATURE(self._batch)  # C calls it for as long as this is there
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _batch(
        self,
        targets: "ctypes._Pointer[ctypes.c_uint64]",
        sources: "ctypes._Pointer[ctypes.c_uint64]",
        sizes: "ctypes._Pointer[ctypes.c_size_t]",
        count: int,
        attributes: int,
        starts: "ctypes._Pointer[ctypes.c_size_t]",
        num_attributes: int,
        failed: "ctypes._Pointer[ctypes.c_size_t]",
        stream: int,
    ) -> int:
        packed = ctypes.string_at(attributes, ATTRIBUTES.size)
        self.calls.append((count, num_attributes, starts[0], stream, *ATTRIBUTES.unpack(packed)))
        if self._code:
            failed[0] = count - 1
            return self._code
        for index in range(count):
            ctypes.memmove(targets[index], sources[index], sizes[index])
        return 0


def _spans(source: "np.typing.NDArray[np.uint8]", target: "np.typing.NDArray[np.uint8]") -> Spans:
    at = np.array([0, 5, 60], np.int64)
    return Spans(
        source.ctypes.data + at, target.ctypes.data + at[::-1], np.array([3, 2, 3], np.int64)
    )


def test_one_call_makes_all_copies() -> None:
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    expected = target.copy()
    expected[60:63], expected[5:7], expected[:3] = source[:3], source[5:7], source[60:63]
    driver = Driver()
    BatchCopy(driver.address).copy(_spans(source, target), STREAM)
    assert target.tolist() == expected.tolist()
    count, num_attributes, start = 3, 1, 0
    source_order, overlap = 1, 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, …PREFER_OVERLAP…
    locations = (0, 0, 0, 0)
    assert driver.calls == [
        (count, num_attributes, start, STREAM, source_order, *locations, overlap)
    ]


def test_no_copies_are_no_call_for_the_driver_refuses_an_empty_one() -> None:
    driver, none = Driver(), np.empty(0, np.int64)
    BatchCopy(driver.address).copy(Spans(none, none, none), STREAM)
    assert driver.calls == []


def test_a_refusal_says_what_and_where() -> None:
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync failed with error 1 at 2"):
        BatchCopy(Driver(code=1).address).copy(_spans(source, target), STREAM)


def test_a_machine_without_the_driver_has_no_batched_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert BatchCopy.find() is None


RESOLVER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    *(ctypes.c_uint64, ctypes.POINTER(ctypes.c_int)),
)


class Resolver:
    """libcuda whose cuGetProcAddress_v2 knows one address of one version, or none."""

    def __init__(self, address: int | None, code: int = 0) -> None:
        self.asked = list[tuple[bytes, int, int]]()
        self._address, self._code = address, code
        self.cuGetProcAddress_v2 = RESOLVER(self._resolve)

    def _resolve(
        self,
        name: bytes,
        found: "ctypes._Pointer[ctypes.c_void_p]",
        version: int,
        flags: int,
        status: "ctypes._Pointer[ctypes.c_int]",
    ) -> int:
        self.asked.append((name, version, flags))
        found[0] = self._address
        return self._code


def test_the_driver_is_asked_for_the_version_whose_signature_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    resolver = Resolver(driver.address)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: resolver)
    copy = BatchCopy.find()
    assert resolver.asked == [(b"cuMemcpyBatchAsync", 12080, 0)]
    assert copy is not None
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    copy.copy(_spans(source, target), STREAM)
    assert len(driver.calls) == 1


@pytest.mark.parametrize("resolver", [Resolver(None), Resolver(0x1000, code=500)])
def test_a_driver_that_is_too_old_has_no_batched_copy(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: resolver)
    assert BatchCopy.find() is None
