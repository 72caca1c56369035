"""Chains that are checked once."""

import pytest

from rootcellar.tiers.chain import CheckedChain

KEYS = [bytes([number]) * 32 for number in range(4)]


def test_a_chain_is_its_keys() -> None:
    chain = CheckedChain(KEYS)
    assert list(chain) == KEYS
    assert chain.head(2) == tuple(KEYS[:2])
    assert type(chain.head(2)) is CheckedChain
    assert chain.head(9) is chain


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ([KEYS[0], "key"], TypeError, r"keys\[1\] is 'key', must be 32 bytes"),
        ([KEYS[0], KEYS[1][:31]], TypeError, r"keys\[1\] is .*, must be 32 bytes"),
        ([bytearray(32)], TypeError, r"keys\[0\] is bytearray"),
        ([KEYS[0], KEYS[1], KEYS[0]], ValueError, "a key stands twice"),
    ],
)
def test_what_is_no_chain_is_refused(keys: list[bytes], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        CheckedChain(keys)
