from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rootcellar.tiers.layout import KVLayout
from rootcellar.tiers.pages import PagePool

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, dtype="bfloat16")


class PoolMachine(RuleBasedStateMachine):
    """A pool against a plain set of slots in use."""

    @initialize(page_size=st.integers(1, 4), num_pages=st.integers(1, 6))
    def start(self, page_size: int, num_pages: int) -> None:
        self.pool = PagePool(LAYOUT, page_size * num_pages, page_size=page_size)
        self.in_use: list[int] = []

    @rule(num_tokens=st.integers(0, 12))
    def allocate(self, num_tokens: int) -> None:
        enough = -(-num_tokens // self.pool.page_size) * self.pool.page_size <= self.pool.num_free
        busy_pages = {slot // self.pool.page_size for slot in self.in_use}
        slots = self.pool.allocate(num_tokens)
        assert (slots is not None) == enough
        if slots is not None:
            assert slots.dtype == np.int64
            assert len(slots) == num_tokens
            assert not busy_pages & set((slots // self.pool.page_size).tolist())
            self.in_use += slots.tolist()

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.in_use), unique=True))
        self.pool.free(np.array(slots, np.int64))
        self.in_use = [slot for slot in self.in_use if slot not in slots]

    @rule(data=st.data())
    def a_slot_that_is_not_in_use_is_refused(self, data: st.DataObject) -> None:
        idle = sorted(set(range(self.pool.num_tokens)) - set(self.in_use))
        if idle:
            slot = data.draw(st.sampled_from(idle))
            with pytest.raises(ValueError, match=f"slot {slot} is not in use"):
                self.pool.free([*self.in_use, slot])

    @invariant()
    def counts_agree(self) -> None:
        busy_pages = {slot // self.pool.page_size for slot in self.in_use}
        assert len(self.in_use) == len(set(self.in_use))
        assert self.pool.num_free == (self.pool.num_tokens - len(busy_pages) * self.pool.page_size)
        self.pool.check_integrity()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_pages_are_one_zeroed_tensor_of_the_layouts_shape_and_dtype() -> None:
    pool = PagePool(KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float16"), 8)
    assert pool.pages.shape == (3, 2, 8, 2, 4)
    assert pool.pages.dtype == torch.float16
    assert not pool.pages.any()


def test_a_pool_that_is_too_full_answers_none_and_changes_nothing() -> None:
    pool = PagePool(LAYOUT, 8, page_size=4)
    assert pool.allocate(9) is None
    assert pool.allocate(5) is not None
    assert pool.allocate(1) is None
    assert pool.num_free == 0


def test_slots_fill_pages_in_order_and_ascend_where_pages_are_free_in_a_row() -> None:
    pool = PagePool(LAYOUT, 8)
    first, second = pool.allocate(3), pool.allocate(5)
    assert first is not None
    assert second is not None
    assert [*first, *second] == list(range(8))
    pool.free(np.concatenate([second, first])[[5, 0, 7, 2, 1, 4]])
    again = pool.allocate(4)
    assert again is not None
    assert again.tolist() == sorted(again.tolist())


def test_a_page_is_free_again_once_its_last_slot_is() -> None:
    pool = PagePool(LAYOUT, 8, page_size=4)
    slots = pool.allocate(6)
    assert slots is not None
    pool.free(slots[:3])
    assert pool.num_free == 0
    pool.free(slots[3:])
    assert pool.num_free == 8


BAD_SLOTS: list[tuple[Any, str]] = [
    ([0, 1, 1], "slot 1 is given twice"),
    ([0, 0], "slot 0 is given twice"),
    ([-1], "slot -1 must be from 0 to 7"),
    ([0, 8], "slot 8 must be from 0 to 7"),
    ([[0]], "slots are int64"),
    ([0.0], "slots are float64"),
]


@pytest.mark.parametrize(("slots", "message"), BAD_SLOTS)
def test_bad_slots_are_refused_and_nothing_changes(slots: npt.ArrayLike, message: str) -> None:
    pool = PagePool(LAYOUT, 8)
    pool.allocate(4)
    with pytest.raises(ValueError, match=message):
        pool.free(slots)
    assert pool.num_free == 4
    pool.check_integrity()


@pytest.mark.parametrize(
    ("num_tokens", "page_size", "message"),
    [(0, 1, "num_tokens is 0"), (10, 4, "num_tokens is 10"), (8, 0, "page_size is 0")],
)
def test_bad_sizes_are_refused(num_tokens: int, page_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagePool(LAYOUT, num_tokens, page_size=page_size)


def test_a_negative_number_of_tokens_is_refused() -> None:
    pool = PagePool(LAYOUT, 4)
    with pytest.raises(ValueError, match="num_tokens is -1"):
        pool.allocate(-1)
    pool.free([])
    assert pool.num_free == 4
