import pytest
import torch

from rootcellar.tiers.arena import SharedArena
from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.pinning import ArenaPinner
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import CHUNK_BYTES, NAMESPACE

SLOT_BYTES = 4096


class FakeCuda:
    """Stands in for a driver: keeps what is registered, refuses when told to."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}
        self.sizes: list[int] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int, /) -> int:
        if self.code == 0:
            self.registered[address] = size_bytes
            self.sizes.append(size_bytes)
        return self.code

    def cudaHostUnregister(self, address: int, /) -> int:
        del self.registered[address]
        return 0


def _settled(pinner: ArenaPinner) -> None:
    pinner._thread.join(10)


def test_the_whole_arena_is_pinned_and_unpinned() -> None:
    arena, cuda = SharedArena(SLOT_BYTES, 8), FakeCuda()
    pinner = ArenaPinner(arena, cuda)
    _settled(pinner)
    assert cuda.registered == {arena.address: 8 * SLOT_BYTES}
    pinner.close()
    pinner.close()
    assert cuda.registered == {}
    arena.close()


def test_a_refusal_is_said_and_the_arena_works_unpinned() -> None:
    arena = SharedArena(SLOT_BYTES, 8)
    pinner = ArenaPinner(arena, FakeCuda(code=2))
    _settled(pinner)
    assert pinner.pinned is not None
    assert "error 2" in pinner.pinned.reason
    pinner.close()
    arena.slot(3)[:] = b"x" * SLOT_BYTES
    arena.close()


@pytest.mark.parametrize("pin", [True, False])
def test_a_store_pins_its_memory_unless_another_process_does(
    monkeypatch: pytest.MonkeyPatch, pin: bool
) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    with TieredStore(StoreConfig(dram_bytes=4 * CHUNK_BYTES, pin_dram=pin), NAMESPACE) as store:
        store.arena_address.attach().close()
    assert cuda.registered == {}
    assert cuda.sizes == [4 * CHUNK_BYTES] * pin
