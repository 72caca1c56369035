import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.tiers.codec import PlaneCodec

ITEMSIZES = st.sampled_from([1, 2, 4, 8])


@given(payload=st.binary(max_size=5000), itemsize=ITEMSIZES)
def test_it_comes_back_byte_for_byte(payload: bytes, itemsize: int) -> None:
    codec, decoded = PlaneCodec(itemsize), bytearray(len(payload))
    stored = codec.encode(memoryview(payload))
    assert codec.decode(memoryview(stored), memoryview(decoded))
    assert decoded == payload


@given(number=st.integers(1, 400), itemsize=ITEMSIZES, rest=st.binary(max_size=3))
def test_bytes_of_equal_place_lie_together(number: int, itemsize: int, rest: bytes) -> None:
    rest = rest[: itemsize - 1]
    payload = bytes(range(itemsize)) * number + rest
    planes = zstandard.ZstdDecompressor().decompress(
        PlaneCodec(itemsize).encode(memoryview(payload))
    )
    assert sorted(planes[: number * itemsize]) == list(planes[: number * itemsize])
    assert planes[number * itemsize :] == rest


@given(stored=st.binary(max_size=200), payload_bytes=st.integers(0, 200))
def test_what_is_not_its_own_is_refused(stored: bytes, payload_bytes: int) -> None:
    assert not PlaneCodec(2).decode(memoryview(stored), memoryview(bytearray(payload_bytes)))


def test_a_frame_of_another_length_is_refused_before_it_is_decoded() -> None:
    codec = PlaneCodec(2)
    bomb = codec.encode(memoryview(bytes(1 << 26)))
    assert len(bomb) < 10_000
    assert not codec.decode(memoryview(bomb), memoryview(bytearray(100)))


def test_values_of_one_magnitude_get_smaller_only_in_planes() -> None:
    payload = bytes(
        byte for number in range(20_000) for byte in ((number * 2654435761 >> 7) & 255, 63)
    )
    in_planes = PlaneCodec(2).encode(memoryview(payload))
    assert len(in_planes) < 0.52 * len(payload)
    assert len(in_planes) < len(PlaneCodec(1).encode(memoryview(payload)))
