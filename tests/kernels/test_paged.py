import pytest
import torch

from rootcellar.kernels import PagedKV
from rootcellar.kernels.paged import stacked


def noise(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


def test_a_slot_is_a_page_of_one_token() -> None:
    pages = noise(3, 2, 7, 4, 5, dtype=torch.bfloat16)
    kv = PagedKV.of_slots(pages)
    assert (len(kv.planes), kv.num_layers, kv.num_pages, kv.dtype) == (6, 3, 7, torch.bfloat16)
    for index, plane in enumerate(kv.planes):
        assert plane.shape == (7, 1, 4, 10)
        assert torch.equal(plane[:, 0], pages[index // 2, index % 2].view(torch.uint8))
        assert plane.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()


def test_heads_of_a_cache_become_tokens_of_one_page_each() -> None:
    layers = [[noise(1, 2, 9, 4, dtype=torch.float16) for _ in range(2)] for _ in range(3)]
    kv = PagedKV.of_heads(layers)
    assert (len(kv.planes), kv.num_layers, kv.num_pages) == (6, 3, 9)
    for index, plane in enumerate(kv.planes):
        states = layers[index // 2][index % 2]
        assert torch.equal(plane[:, 0], states[0].transpose(0, 1).view(torch.uint8))


def test_rows_are_pages_whatever_is_in_them() -> None:
    rows = [noise(4, 6), noise(5, 11)]
    kv = PagedKV.of_rows(rows)
    assert (kv.num_layers, kv.num_pages, kv.chunk_bytes(3)) == (1, 4, 3 * 17)
    assert torch.equal(kv.planes[1][:, 0, 0], rows[1])


def test_a_part_is_some_planes_and_made_once() -> None:
    kv = PagedKV.of_slots(noise(3, 2, 7, 1, 5))
    part = kv.part(kv.layer(1))
    assert part.planes == kv.planes[2:4]
    assert part is kv.part(range(2, 4))
    assert kv.chunk_bytes(4, kv.layer(1)) == part.chunk_bytes(4) == 4 * 2 * 5
    assert kv.chunk_bytes(4) == 4 * 6 * 5


@pytest.mark.parametrize(
    ("planes", "num_layers", "message"),
    [
        ([], 1, "0 planes for 1 layers"),
        ([noise(2, 1, 1, 4)] * 3, 2, "3 planes for 2 layers"),
        ([noise(2, 1, 1, 4)], 0, "1 planes for 0 layers"),
        ([noise(2, 1, 1, 4), noise(2, 1, 4)], 1, r"planes\[1\] is torch.uint8 \(2, 1, 4\)"),
        ([noise(2, 1, 1, 4, dtype=torch.int16)], 1, r"planes\[0\] is torch.int16"),
        ([noise(2, 1, 1, 4)[..., ::2]], 1, r"planes\[0\] .* the last of stride 1"),
        ([noise(2, 1, 1, 0)], 1, r"planes\[0\] .* at least a byte a page"),
        ([noise(2, 1, 1, 4), noise(2, 1, 1, 4).to("meta")], 1, r"planes\[1\] is on meta"),
    ],
)
def test_planes_that_do_not_fit_are_refused(
    planes: list[torch.Tensor], num_layers: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PagedKV(tuple(planes), num_layers)


def test_slots_of_other_than_five_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pages are \(2, 3\), must be of five dimensions"):
        PagedKV.of_slots(noise(2, 3))


def test_planes_evenly_apart_in_one_memory_are_seen_as_one() -> None:
    memory, other = noise(5, 4, 2, 3, 8), noise(4, 2, 3, 8)
    planes = [memory[0], memory[1], memory[2], memory[4], other, memory[1]]
    found = list(stacked(planes))
    assert [len(stack) for stack in found] == [3, 2 - 1, 1, 1]
    assert all(
        torch.equal(plane, expected)
        for plane, expected in zip((p for stack in found for p in stack), planes, strict=True)
    )


def test_planes_of_different_form_are_not_seen_as_one() -> None:
    memory = noise(6, 4, 3, 3, 8)
    planes = [memory[0], memory[1], memory[2][:3], memory[3], memory[4].transpose(1, 2)]
    assert [tuple(stack.shape) for stack in stacked(planes)] == [
        (2, 4, 3, 3, 8),
        (1, 3, 3, 3, 8),
        (1, 4, 3, 3, 8),
        (1, 4, 3, 3, 8),
    ]


@pytest.mark.parametrize("shape", [(2, 2, 16, 64), (2, 16, 64), (1, 1, 2, 16, 64)])
def test_heads_of_more_than_one_sequence_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be \(1, num_kv_heads, tokens, head_dim\)"):
        PagedKV.of_heads([(torch.zeros(shape), torch.zeros(shape))])


def test_no_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="layers are none"):
        PagedKV.of_heads([])
