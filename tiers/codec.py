"""Zstandard over byte planes: the first bytes of all elements, then the second ones, and so on.

Neighbouring values of a KV cache share sign and exponent but hardly any mantissa bit; in planes
the bytes that repeat lie together, and the others no longer disturb them.
"""

import numpy as np
import zstandard
from numpy.typing import NDArray

LEVEL = 1


class PlaneCodec:
    """Encodes and decodes one chunk at a time; each thread needs its own.

    itemsize: bytes per element. Bytes after the last whole element follow the planes as they are.
    """

    def __init__(self, itemsize: int) -> None:
        self._itemsize = itemsize
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, payload: memoryview) -> bytes:
        """The stored bytes; they may be more than the payload's."""
        data = np.frombuffer(payload, np.uint8)
        whole = self._whole(len(data))
        planes = np.empty_like(data)
        self._matrix(planes[:whole].reshape(self._itemsize, -1))[:] = data[:whole].reshape(
            -1, self._itemsize
        )
        planes[whole:] = data[whole:]
        return self._compressor.compress(planes.data)

    def decode(self, stored: memoryview, payload: memoryview) -> bool:
        """Fill payload from what encode() gave; False if that is not what `stored` is."""
        try:
            if zstandard.frame_content_size(stored) != len(payload):
                return False  # asked first: the decoder allocates what the frame claims
            planes = np.frombuffer(self._decompressor.decompress(stored), np.uint8)
        except zstandard.ZstdError:
            return False
        data = np.frombuffer(payload, np.uint8)
        whole = self._whole(len(data))
        data[:whole].reshape(-1, self._itemsize)[:] = self._matrix(
            planes[:whole].reshape(self._itemsize, -1)
        )
        data[whole:] = planes[whole:]
        return True

    def _whole(self, size_bytes: int) -> int:
        return size_bytes // self._itemsize * self._itemsize

    @staticmethod
    def _matrix(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Elements by bytes, over planes that are bytes by elements."""
        return planes.T
