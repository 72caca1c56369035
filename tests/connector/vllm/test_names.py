"""vLLM's names of chunks and ours, there and back."""

import hashlib

import pytest
from vllm.v1.kv_offload.base import make_offload_key

from rootcellar.connector.vllm.names import ChunkNames, NameBook, SaltedNames

HASHES = [hashlib.sha256(str(number).encode()).digest() for number in range(20)]


ONE, OTHER = bytes(range(32)), bytes(range(1, 33))


def test_keys_are_32_bytes_and_differ_by_hash_group_and_namespace() -> None:
    keys = {
        ChunkNames(namespace).key(make_offload_key(block_hash, group_id))
        for namespace in (ONE, OTHER)
        for block_hash in HASHES
        for group_id in (0, 1, 7)
    }
    assert {len(key) for key in keys} == {32}
    assert len(keys) == 2 * len(HASHES) * 3


def test_chunks_spread_over_the_folders_of_a_store() -> None:
    names = ChunkNames(ONE)
    assert len({names.key(make_offload_key(block_hash, 0))[0] for block_hash in HASHES}) > 10


@pytest.mark.parametrize("group_id", [0, 4])
def test_a_whole_groups_keys_are_those_of_its_offload_keys(group_id: int) -> None:
    names = ChunkNames(ONE)
    one_by_one = [names.key(make_offload_key(block_hash, group_id)) for block_hash in HASHES]
    assert names.keys(HASHES, group_id) == one_by_one


def test_a_salt_changes_every_key_and_is_the_same_each_time() -> None:
    plain = ChunkNames(ONE)
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
