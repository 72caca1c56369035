"""vLLM's names of chunks and ours, there and back."""

import hashlib

import pytest
from vllm.v1.kv_offload.base import make_offload_key

from rootcellar.connector.vllm.names import ChunkNames, NameBook, SaltedNames

HASHES = [hashlib.sha256(str(number).encode()).digest() for number in range(20)]


def test_with_one_group_the_key_is_the_block_hash() -> None:
    names = ChunkNames([3])
    assert names.key(make_offload_key(HASHES[0], 3)) == HASHES[0]
    assert names.keys(HASHES, 3) == HASHES


@pytest.mark.parametrize("group_ids", [[0], [7], [0, 1], [2, 5, 6]])
def test_keys_are_32_bytes_and_differ_by_hash_and_group(group_ids: list[int]) -> None:
    names = ChunkNames(group_ids)
    keys = [names.key(make_offload_key(h, g)) for h in HASHES for g in group_ids]
    assert {len(key) for key in keys} == {32}
    assert len(set(keys)) == len(HASHES) * len(group_ids)


@pytest.mark.parametrize("group_ids", [[4], [0, 1, 2]])
def test_a_whole_groups_keys_are_those_of_its_offload_keys(group_ids: list[int]) -> None:
    names = ChunkNames(group_ids)
    for group_id in group_ids:
        one_by_one = [names.key(make_offload_key(h, group_id)) for h in HASHES]
        assert names.keys(HASHES, group_id) == one_by_one


def test_a_salt_changes_every_key_and_is_the_same_each_time() -> None:
    plain = ChunkNames([0, 1])
    salted = SaltedNames(plain, b"adapter")
    keys = salted.keys(HASHES, 1)
    assert not set(keys) & set(plain.keys(HASHES, 1))
    assert not set(keys) & set(SaltedNames(plain, b"other").keys(HASHES, 1))
    assert keys == [salted.key(make_offload_key(h, 1)) for h in HASHES]
    assert {len(key) for key in keys} == {32}


def test_vllms_name_is_known_once_it_was_written_down() -> None:
    book, offload_key = NameBook(), make_offload_key(HASHES[0], 1)
    assert book.offload_key(HASHES[1]) is None
    book.write([HASHES[1]], [offload_key])
    assert book.offload_key(HASHES[1]) == offload_key


def test_the_memory_of_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootcellar.connector.vllm.names.MOST_REMEMBERED", 5)
    book, told = NameBook(), [make_offload_key(h, 0) for h in HASHES]
    book.write(HASHES, told)
    assert [book.offload_key(key) for key in HASHES] == [None] * 15 + told[15:]
