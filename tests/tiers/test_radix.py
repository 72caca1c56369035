import gc
import weakref
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from rootcellar.tiers.radix import Match, RadixTree
from rootcellar.tiers.radix_node import Node

Extra = str | None
Root = tuple[int, Extra]
"""How often the tree had been cleared, and the extra key: no match crosses from one to another."""
Prefix = tuple[Root, tuple[int, ...]]


class Held:
    """What the naive model knows of one token: its slot and when a use last reached it."""

    def __init__(self, slot: int, used: int) -> None:
        self.slot = slot
        self.used = used


class NaiveTree:
    """A list of lists: every held prefix, spelled out, with the slot of its last token."""

    def __init__(self) -> None:
        self.held: dict[Prefix, Held] = {}
        self.pins: list[Prefix] = []
        self.clock = 0
        self.clears = 0

    def match(self, extra: Extra, tokens: list[int]) -> list[int]:
        root, known = (self.clears, extra), 0
        while known < len(tokens) and (root, tuple(tokens[: known + 1])) in self.held:
            known += 1
        self.use((root, tuple(tokens[:known])))
        return [self.held[root, tuple(tokens[: i + 1])].slot for i in range(known)]

    def insert(self, extra: Extra, tokens: list[int], slots: list[int]) -> int:
        known = len(self.match(extra, tokens))
        for i in range(known, len(tokens)):
            self.held[(self.clears, extra), tuple(tokens[: i + 1])] = Held(slots[i], self.clock)
        return known

    def use(self, prefix: Prefix) -> None:
        self.clock += 1
        root, tokens = prefix
        for i in range(len(tokens)):
            self.held[root, tokens[: i + 1]].used = self.clock

    def evict(self, num_tokens: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < num_tokens and (victims := self.victims()):
            oldest = min(victims, key=lambda prefix: self.held[prefix].used)
            freed.append(self.held.pop(oldest).slot)
        return freed

    def clear(self) -> list[int]:
        freed = self.evict(len(self.held))
        self.clears += 1
        return freed

    def victims(self) -> list[Prefix]:
        inner = {(root, tokens[:-1]) for root, tokens in self.held}
        return [prefix for prefix in self.held if prefix not in inner and prefix not in self.pins]


few_tokens = st.lists(st.integers(0, 2), max_size=9)
extras = st.sampled_from([None, None, "a"])


class RadixMachine(RuleBasedStateMachine):
    """The tree against the naive model; the model also stands in for the pool of slots."""

    pinned: Bundle[tuple[Node, Prefix]] = Bundle("pinned")

    @initialize()
    def start(self) -> None:
        self.tree = RadixTree()
        self.naive = NaiveTree()
        self.next_slot = 0

    @rule(extra=extras, tokens=few_tokens)
    def insert(self, extra: Extra, tokens: list[int]) -> None:
        slots = list(range(self.next_slot, self.next_slot + len(tokens)))
        self.next_slot += len(tokens)
        assert self.tree.insert(tokens, slots, extra) == self.naive.insert(extra, tokens, slots)

    @rule(extra=extras, tokens=few_tokens)
    def match(self, extra: Extra, tokens: list[int]) -> None:
        self.check_match(extra, tokens)

    @rule(target=pinned, extra=extras, tokens=few_tokens)
    def pin(self, extra: Extra, tokens: list[int]) -> tuple[Node, Prefix]:
        match = self.check_match(extra, tokens)
        prefix = ((self.naive.clears, extra), tuple(tokens[: match.num_tokens]))
        self.tree.pin(match.node)
        self.naive.pins.append(prefix)
        return match.node, prefix

    @rule(handle=consumes(pinned))
    def unpin(self, handle: tuple[Node, Prefix]) -> None:
        node, prefix = handle
        self.tree.unpin(node)
        self.naive.pins.remove(prefix)
        self.naive.use(prefix)

    @rule(handle=pinned)
    def a_pinned_prefix_is_still_there(self, handle: tuple[Node, Prefix]) -> None:
        _, ((clears, extra), tokens) = handle
        if clears == self.naive.clears:
            assert self.check_match(extra, list(tokens)).num_tokens == len(tokens)

    @rule(num_tokens=st.integers(0, 12))
    def evict(self, num_tokens: int) -> None:
        freed = self.tree.evict(num_tokens).tolist()
        assert sorted(freed) == sorted(self.naive.evict(num_tokens))

    @precondition(lambda self: len(self.tree) > 12)
    @rule()
    def clear(self) -> None:
        assert sorted(self.tree.clear().tolist()) == sorted(self.naive.clear())

    @invariant()
    def is_sound(self) -> None:
        self.tree.check_integrity()
        assert len(self.tree) == len(self.naive.held)

    def check_match(self, extra: Extra, tokens: list[int]) -> Match:
        match = self.tree.match(tokens, extra)
        assert match.slots.tolist() == self.naive.match(extra, tokens)
        assert match.num_tokens == len(match.slots)
        return match


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def tree_of(*sequences: list[int]) -> RadixTree:
    """Slots count up from 0 in the order in which tokens become known."""
    tree = RadixTree()
    for tokens in sequences:
        known = tree.match(tokens).slots
        tree.insert(tokens, [*known, *range(len(tree), len(tree) + len(tokens) - len(known))])
    return tree


def test_a_match_may_end_inside_an_edge() -> None:
    tree = tree_of([1, 2, 3, 4])
    match = tree.match([1, 2, 9])
    assert (match.num_tokens, match.slots.tolist()) == (2, [0, 1])
    assert tree.match([1, 2, 3, 4, 5]).slots.tolist() == [0, 1, 2, 3]


def test_nothing_found_is_a_match_of_zero_tokens_that_can_be_pinned() -> None:
    tree = tree_of([1, 2])
    match = tree.match([5])
    assert (match.num_tokens, match.slots.tolist()) == (0, [])
    assert match.slots.dtype == np.int64
    tree.pin(match.node)
    assert len(tree.evict(10)) == 2
    tree.unpin(match.node)
    tree.check_integrity()


def test_known_tokens_keep_their_slots() -> None:
    tree = tree_of([1, 2, 3])
    assert tree.insert([1, 2, 3, 4], [90, 91, 92, 93]) == 3
    assert tree.match([1, 2, 3, 4]).slots.tolist() == [0, 1, 2, 93]


def test_extra_keys_share_nothing() -> None:
    tree = RadixTree()
    for slot, extra in enumerate([None, "a", "b", ("a", 1), b"a"]):
        assert tree.insert([7], [slot], extra=extra) == 0
    assert tree.match([7], extra="b").slots.tolist() == [2]
    assert tree.match([7], extra="nobody").num_tokens == 0
    tree.check_integrity()


def test_eviction_takes_the_least_recently_used_leaf_from_its_tail() -> None:
    tree = tree_of([1, 2, 3, 4], [1, 2, 5, 6])
    tree.match([1, 2, 3, 4])
    assert tree.evict(1).tolist() == [5]
    assert tree.evict(2).tolist() == [4, 3]
    assert tree.evict(9).tolist() == [2, 0, 1]
    assert (len(tree), tree.num_nodes) == (0, 0)


def test_a_leaf_goes_before_its_parent_however_often_the_parent_is_used() -> None:
    tree = tree_of([1, 2, 3], [1, 2, 4], [8, 9])
    tree.match([1, 2, 3])
    tree.match([1, 2, 4])
    assert tree.evict(2).tolist() == [4, 5]
    assert tree.evict(1).tolist() == [2]


def test_a_pin_protects_the_matched_prefix_and_no_more() -> None:
    tree = tree_of([1, 2, 3, 4])
    tree.pin(tree.match([1, 2]).node)
    assert tree.evict(4).tolist() == [2, 3]
    assert tree.match([1, 2, 3]).num_tokens == 2


def test_a_pin_survives_later_splits_of_its_node() -> None:
    tree = tree_of([1, 2, 3, 4])
    whole = tree.match([1, 2, 3, 4])
    tree.pin(whole.node)
    tree.insert([1, 2, 8], [0, 1, 4])
    tree.insert([1, 7], [0, 5])
    assert sorted(tree.evict(9).tolist()) == [4, 5]
    assert tree.match([1, 2, 3, 4]).slots.tolist() == whole.slots.tolist()
    tree.unpin(whole.node)
    tree.check_integrity()
    assert len(tree.evict(9)) == 4


def test_a_node_pinned_twice_needs_two_unpins() -> None:
    tree = tree_of([1, 2])
    node = tree.match([1, 2]).node
    tree.pin(node)
    tree.pin(node)
    tree.unpin(node)
    assert len(tree.evict(2)) == 0
    tree.unpin(node)
    assert len(tree.evict(2)) == 2


def test_a_pin_needs_a_node_that_is_held_and_an_unpin_a_pin() -> None:
    tree = tree_of([1, 2, 3], [1, 2, 4])
    parent, leaf = tree.match([1, 2]).node, tree.match([1, 2, 3]).node
    tree.pin(leaf)
    with pytest.raises(ValueError, match=r"not pinned.*2 tokens"):
        tree.unpin(parent)
    tree.unpin(leaf)
    tree.evict(3)
    with pytest.raises(ValueError, match="no longer in the tree"):
        tree.pin(leaf)
    tree.check_integrity()


def test_matched_slots_are_the_callers_own_copy() -> None:
    tree = tree_of([1, 2, 3])
    tree.match([1, 2, 3]).slots[:] = -1
    assert tree.match([1, 2, 3]).slots.tolist() == [0, 1, 2]


def test_clear_frees_what_is_not_pinned_and_hides_the_rest_until_it_is_evicted() -> None:
    tree = tree_of([1, 2, 3, 4], [5, 6])
    node = tree.match([1, 2]).node
    tree.pin(node)
    assert sorted(tree.clear().tolist()) == [2, 3, 4, 5]
    assert tree.match([1, 2]).num_tokens == 0
    assert tree.insert([1, 2], [10, 11]) == 0
    tree.unpin(node)
    tree.check_integrity()
    assert sorted(tree.evict(9).tolist()) == [0, 1, 10, 11]


def test_clear_hides_prefixes_under_every_extra_key() -> None:
    tree = RadixTree()
    for slot, extra in enumerate([None, "a"]):
        tree.insert([1], [slot], extra=extra)
        tree.pin(tree.match([1], extra=extra).node)
    assert len(tree.clear()) == 0
    assert [tree.match([1], extra=extra).num_tokens for extra in (None, "a")] == [0, 0]
    assert len(tree) == 2


Maker = Callable[[list[int]], Any]


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda ids: np.array(ids, np.int32),
        lambda ids: np.array(ids, np.int64),
        lambda ids: np.array(ids, np.uint16),
        lambda ids: np.array(ids, ">i4"),
        lambda ids: np.repeat(np.array(ids, np.int32), 2)[::2],
        lambda ids: torch.tensor(ids),
        lambda ids: torch.tensor(ids, dtype=torch.int32),
        lambda ids: np.array(ids, "<i4").tobytes(),
    ],
    ids=["list", "tuple", "int32", "int64", "uint16", "big", "strided", "torch", "torch32", "raw"],
)
def test_tokens_are_the_same_in_every_form(make: Maker) -> None:
    tree = tree_of([1, 300, 3, 4])
    assert tree.match(make([1, 300, 3, 9])).num_tokens == 3
    assert tree.insert(make([1, 300, 3, 9]), [0, 1, 2, 4]) == 3
    tree.check_integrity()


BAD_TOKENS: list[tuple[Any, type[Exception], str]] = [
    ([1, 2, -3], ValueError, "token 2 is -3"),
    ([1, 2**31, 3], ValueError, "token 1 is 2147483648"),
    (np.array([1, -2, 3]), ValueError, "token 1 is -2"),
    (np.array([1, 2, 2**40]), ValueError, "token 2 is"),
    (torch.tensor([-1, 2, 3]), ValueError, "token 0 is -1"),
    (np.ones((3, 3), np.int32), ValueError, "tokens have shape"),
    (np.ones(3), TypeError, "tokens have dtype float64"),
    ([1, "2", 3], TypeError, "token 1 is '2'"),
    (b"\1\2\3", ValueError, "tokens are 3 bytes"),
]


@pytest.mark.parametrize(("tokens", "error", "message"), BAD_TOKENS)
def test_bad_tokens_are_refused_with_their_position(
    tokens: Any, error: type[Exception], message: str
) -> None:
    tree = tree_of([1, 2, 3, 4])
    with pytest.raises(error, match=message):
        tree.match(tokens)
    with pytest.raises(error, match=message):
        tree.insert(tokens, [7, 8, 9])
    assert (len(tree), tree.num_nodes) == (4, 1)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([1, 2], r"slots have shape \(2,\), must be \(3,\)"),
        (np.ones((3, 1), np.int64), "slots have shape"),
        (np.ones(3), "slots have dtype float64"),
        ([4, 5, -6], "slot 2 is -6"),
    ],
)
def test_bad_slots_are_refused_before_anything_changes(slots: npt.ArrayLike, message: str) -> None:
    tree = tree_of([1, 2, 3, 4])
    with pytest.raises(ValueError, match=message):
        tree.insert([1, 2, 9], slots)
    assert (len(tree), tree.num_nodes) == (4, 1)


def test_other_bad_arguments_change_nothing() -> None:
    tree = tree_of([1, 2, 3, 4])
    with pytest.raises(ValueError, match="num_tokens is -1"):
        tree.evict(-1)
    not_whole: Any = 1.5
    with pytest.raises(TypeError):
        tree.evict(not_whole)
    unhashable: Any = ["list"]
    with pytest.raises(TypeError, match="unhashable"):
        tree.match([1, 2], extra=unhashable)
    assert (len(tree), tree.num_nodes) == (4, 1)


def test_empty_sequences_are_held_by_every_tree() -> None:
    tree = RadixTree()
    assert tree.insert([], []) == 0
    assert tree.match([]).num_tokens == 0
    assert tree.evict(3).tolist() == tree.clear().tolist() == []
    tree.check_integrity()


def test_an_evicted_node_keeps_no_other_node_alive() -> None:
    tree = RadixTree()
    for token in range(3):
        tree.insert([token], [token])
    first = tree.match([0]).node
    tree.match([1])
    tree.match([2])
    gc.collect()
    before = sum(type(thing) is Node for thing in gc.get_objects())
    tree.evict(2)
    assert first.parent is None
    alive = sum(type(thing) is Node for thing in gc.get_objects())
    assert alive == before - 1


def test_a_path_of_twenty_thousand_nodes_meets_no_recursion_limit() -> None:
    depth = 20_000
    tokens = np.arange(depth, dtype="<i4")
    packed = tokens.tobytes()
    tree = RadixTree()
    tree.insert(packed, tokens)
    for end in range(depth - 1, 0, -1):
        tree.match(packed[: 4 * end])
    assert tree.num_nodes == depth
    match = tree.match(packed)
    assert match.slots.tolist() == tokens.tolist()
    tree.pin(match.node)
    tree.check_integrity()
    assert len(tree.clear()) == 0
    tree.unpin(match.node)
    assert tree.evict(depth // 2).tolist() == tokens[: depth // 2 - 1 : -1].tolist()
    del tree, match
    gc.collect()


def test_a_hundred_thousand_nodes_are_held_and_let_go_in_order() -> None:
    num_leaves, shared = 100_000, 4
    tree = RadixTree()
    tokens = np.arange(shared + 2, dtype=np.int32)
    for leaf in range(num_leaves):
        tokens[0], tokens[shared:] = leaf % 64, (leaf, leaf)
        group = tree.match(tokens[:shared]).slots
        new = np.arange(len(tree), len(tree) + shared + 2 - len(group))
        tree.insert(tokens, np.concatenate([group, new]))
    assert tree.num_nodes == num_leaves + 64
    tree.check_integrity()
    # The first leaf of each group came with the group's own slots.
    assert tree.evict(4).tolist() == [4, 5, 10, 11]
    assert len(tree.evict(len(tree))) == 2 * (num_leaves - 2) + 64 * shared
    tree.check_integrity()


def test_a_dropped_tree_is_collected() -> None:
    tree = tree_of([1, 2, 3], [1, 2, 4])
    gone = weakref.ref(tree)
    del tree
    gc.collect()
    assert gone() is None
