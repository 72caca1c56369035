from hypothesis import given
from hypothesis import strategies as st

from rootcellar.tiers.pinned import PIECE_BYTES, pin


class _Cuda:
    """Registers like CUDA: whole, known addresses only; refuses from the given call on."""

    def __init__(self, refuse_from: int = 1 << 30) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.refuse_from = refuse_from

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int, /) -> int:
        assert flags == 1
        self.calls += 1
        if self.calls > self.refuse_from:
            return 2
        self.registered[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int, /) -> int:
        del self.registered[address]
        return 0


@given(size_bytes=st.integers(1, 1000), piece_bytes=st.integers(1, 300))
def test_every_byte_is_pinned_once_in_pieces(size_bytes: int, piece_bytes: int) -> None:
    cuda = _Cuda()
    pinned = pin(4096, size_bytes, cuda, piece_bytes)
    assert pinned.reason == ""
    end = 4096
    for address, size in sorted(cuda.registered.items()):
        assert address == end
        assert size <= piece_bytes
        end += size
    assert end == 4096 + size_bytes
    pinned.unpin()
    pinned.unpin()
    assert cuda.registered == {}


def test_a_terabyte_goes_in_pieces_that_drivers_take() -> None:
    cuda = _Cuda()
    pin(0, (1 << 40) + 4096, cuda)
    assert max(cuda.registered.values()) == PIECE_BYTES == 64 << 30
    assert sum(cuda.registered.values()) == (1 << 40) + 4096


def test_what_cuda_refuses_is_left_unpinned_as_a_whole_with_the_reason() -> None:
    cuda = _Cuda(refuse_from=2)
    pinned = pin(4096, 1000, cuda, 300)
    assert cuda.registered == {}
    assert pinned.pieces == []
    assert pinned.reason == "cudaHostRegister refused 300 bytes with error 2"
