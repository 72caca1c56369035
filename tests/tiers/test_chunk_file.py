import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.tiers.chunk_file import (
    ALIGN_BYTES,
    HEADER_BYTES,
    chunk_path,
    file_bytes,
    folder_name,
    matching_digest,
    pack_header,
    parse_folder,
    parse_header,
    parse_name,
    supports_o_direct,
)
from rootcellar.tiers.io.base import ChunkMeta, Codec
from rootcellar.tiers.io.testing import key_of, meta_of

U64 = st.integers(0, 2**64 - 1)
NAME = st.binary(min_size=32, max_size=32)
DIGEST = st.binary(min_size=16, max_size=16)
METAS = st.builds(
    ChunkMeta,
    namespace=NAME,
    generation=U64,
    key=NAME,
    parent=NAME,
    num_tokens=st.integers(0, 2**32 - 1),
    payload_bytes=U64,
    stored_bytes=U64,
    codec=st.sampled_from(Codec),
)


@given(meta=METAS, digest=DIGEST)
def test_a_header_says_what_was_packed(meta: ChunkMeta, digest: bytes) -> None:
    header = pack_header(meta, digest)
    assert len(header) == HEADER_BYTES
    assert parse_header(header) == (meta, digest)
    assert matching_digest(header, meta) == digest
    assert matching_digest(memoryview(bytearray(header)), meta) == digest


@given(meta=METAS, digest=DIGEST, bit=st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_header_with_any_bit_flipped_is_not_whole(
    meta: ChunkMeta, digest: bytes, bit: int
) -> None:
    header = bytearray(pack_header(meta, digest))
    header[bit // 8] ^= 1 << bit % 8
    assert parse_header(bytes(header)) is None
    assert matching_digest(bytes(header), meta) is None


@given(meta=METAS, other=METAS, field=st.sampled_from([field.name for field in fields(ChunkMeta)]))
def test_a_header_matches_only_if_every_field_does(
    meta: ChunkMeta, other: ChunkMeta, field: str
) -> None:
    changed = replace(meta, **{field: getattr(other, field)})
    header = pack_header(meta, bytes(16))
    assert (matching_digest(header, changed) is not None) == (changed == meta)


@pytest.mark.parametrize("size_bytes", [0, 1, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_header_of_another_length_is_none(size_bytes: int) -> None:
    header = pack_header(meta_of(1), bytes(16)).ljust(HEADER_BYTES + 1, b"\0")
    assert parse_header(header[:size_bytes]) is None


def test_a_header_of_another_format_version_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootcellar.tiers.chunk_file.FORMAT_VERSION", 2)
    header = pack_header(meta_of(1), bytes(16))
    monkeypatch.undo()
    assert parse_header(header) is None


def test_the_format_on_disk_does_not_change_unnoticed() -> None:
    """Anything that breaks this needs another FORMAT_VERSION."""
    header = pack_header(meta_of(1, 2, codec=Codec.ZSTD_PLANES), bytes(range(16)))
    assert header[:12] == b"rootcell\x01\0\0\0"
    assert header[12:44] == meta_of(1).namespace
    assert header[44:52] == (1).to_bytes(8, "little")
    assert header[52:116] == key_of(1) + key_of(2)
    assert header[116:140] == bytes.fromhex("00010000 0040000000000000 0040000000000000 01000000")
    assert header[140:156] == bytes(range(16))
    assert header[156:4080] == bytes(4080 - 156)
    assert header[4080:].hex() == "fa81b656173635fd230e258e395fd593"
    assert chunk_path("/root", meta_of(1)) == (
        f"/root/chunks/{meta_of(1).namespace.hex()}-0000000000000001"
        f"/{key_of(1).hex()[:2]}/{key_of(1).hex()}.kv"
    )


@given(namespace=NAME, generation=U64, key=NAME)
def test_names_are_read_back(namespace: bytes, generation: int, key: bytes) -> None:
    assert parse_folder(folder_name(namespace, generation)) == (namespace, generation)
    assert parse_name(f"{key.hex()}.kv") == key


@pytest.mark.parametrize("name", ["", "x", "ab" * 32, "AB" * 32 + ".kv", "ab" * 31 + ".kv", "a\n"])
def test_other_names_are_not_ours(name: str) -> None:
    assert parse_name(name) is None
    assert parse_folder(name) is None


@given(stored_bytes=st.integers(0, 1 << 40))
def test_a_raw_file_is_header_and_padded_payload(stored_bytes: int) -> None:
    size_bytes = file_bytes(stored_bytes, Codec.RAW)
    assert size_bytes % ALIGN_BYTES == 0
    assert 0 <= size_bytes - HEADER_BYTES - stored_bytes < ALIGN_BYTES


@given(stored_bytes=st.integers(1, 1 << 40))
def test_a_compressed_file_wastes_at_most_an_eighth(stored_bytes: int) -> None:
    size_bytes = file_bytes(stored_bytes, Codec.ZSTD_PLANES)
    padded = file_bytes(stored_bytes, Codec.RAW) - HEADER_BYTES
    assert size_bytes % ALIGN_BYTES == 0
    assert padded <= size_bytes - HEADER_BYTES <= padded * 9 / 8


def test_compressed_files_come_in_few_sizes() -> None:
    sizes = {file_bytes(stored, Codec.ZSTD_PLANES) for stored in range(16 << 20, 32 << 20, 4096)}
    assert len(sizes) == 9


@given(one=st.integers(1, 1 << 30), other=st.integers(1, 1 << 30), codec=st.sampled_from(Codec))
def test_more_bytes_never_take_a_smaller_file(one: int, other: int, codec: Codec) -> None:
    assert file_bytes(min(one, other), codec) <= file_bytes(max(one, other), codec)


def test_probing_for_o_direct_leaves_nothing_behind(tmp_path: Path) -> None:
    assert supports_o_direct(tmp_path) in (True, False)
    (tmp_path / "tmp").mkdir()
    supports_o_direct(tmp_path)
    assert os.listdir(tmp_path) == ["tmp"]
    assert os.listdir(tmp_path / "tmp") == []


def test_what_cannot_be_written_has_no_o_direct(tmp_path: Path) -> None:
    assert not supports_o_direct(tmp_path / "absent")
    assert not supports_o_direct(Path("/proc"))
