"""The hot tier's index: a radix tree from token prefixes to page slots, at token granularity.

    root ── [system prompt] ─┬─ [question 1][its answer]
                             └─ [question 2]

An edge is the packed bytes of its tokens, so that matching compares memory, not tokens. A node is
its edge and what hangs below it; it stands for the whole prefix from the root to its edge's end.
Extra keys are part of the root's edges only: prefixes with different ones share no node.

Eviction order. One doubly linked list holds every node that no pin protects, least recently used
first. A use moves its whole path to the end, deepest node first, so in the list a node always
comes after all of its children: the first one is a leaf, and evicting costs O(1) per node.

Splits. A match or insert that ends inside an edge cuts it there. The node keeps its identity as
the lower part, so whoever pinned it still protects the prefix it matched; the new upper part is
protected as its ancestor.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .keys import Tokens, int32_bytes
from .radix_node import (
    SLOT_BYTES,
    TOKEN_BYTES,
    Node,
    check_node,
    common_bytes,
    link_before,
    path_of,
    unlink,
)

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix found: its length, its slots (the caller's own copy) and its node.

    Valid until the tree next evicts or is cleared; pin the node to keep it longer.
    """

    num_tokens: int
    slots: Slots
    node: Node


class RadixTree:
    """Maps token prefixes to slots. Knows nothing of memory: slots come from and go to a PagePool.

    tokens: packed as `rootcellar.tiers.keys` does, with its ValueError or TypeError naming the
    position of a bad id, or as bytes that are little-endian int32 already, taken on trust.
    extra: whatever else separates prefixes (adapter, tenant, image hashes), compared by equality;
    None is one of them.
    A wrong argument raises before anything changes. For one thread.
    """

    def __init__(self) -> None:
        # Also the eviction list's end in both directions: root.newer is the first to go.
        self._root = Node(None, b"", b"", None)
        self.num_nodes = 0
        """Nodes, without the root."""
        self.num_tokens = 0
        """Tokens held, each with one slot."""

    def __len__(self) -> int:
        return self.num_tokens

    def insert(self, tokens: Tokens | bytes, slots: npt.ArrayLike, extra: Hashable = None) -> int:
        """Hold `slots[i]` for the prefix tokens[:i+1]; counts as a use of the whole prefix.

        Returns how many leading tokens were there already. Those keep the slots they had: the
        given ones stay the caller's, all later ones belong to the tree until evict or clear.
        """
        data = _token_bytes(tokens)
        slot_bytes = _slot_bytes(slots, len(data) // TOKEN_BYTES)
        node, known, _ = self._descend(data, extra)
        if known < len(data):
            node = self._add_leaf(node, data[known:], slot_bytes[known * 2 :], extra)
        self._use(node)
        return known // TOKEN_BYTES

    def match(self, tokens: Tokens | bytes, extra: Hashable = None) -> Match:
        """The longest prefix of `tokens` held, ending anywhere; counts as a use of it.

        Nothing found is a match of zero tokens at the root, which may be pinned like any node.
        """
        node, known, parts = self._descend(_token_bytes(tokens), extra)
        self._use(node)
        return Match(known // TOKEN_BYTES, _as_slots(parts), node)

    def pin(self, node: Node) -> None:
        """Keep `node` and its ancestors from being evicted until as many calls of `unpin`.

        ValueError if the node has been evicted or cleared since it was matched.
        """
        self._check_held(node)
        node.pins += 1
        for held in path_of(node):
            if not held.locks:
                unlink(held)
            held.locks += 1

    def unpin(self, node: Node) -> None:
        """Take back one `pin`; what no pin protects any more counts as just used."""
        if not node.pins:
            raise ValueError(f"node is not pinned (it ends a prefix of {_depth(node)} tokens)")
        node.pins -= 1
        for held in path_of(node):
            held.locks -= 1
            if not held.locks:
                link_before(self._root, held)

    def evict(self, num_tokens: int) -> Slots:
        """Let go of `num_tokens` tokens, or of all that no pin protects if they are fewer.

        Least recently used leaf first, each from its tail; the last leaf only as far as needed.
        Returns the freed slots, which are the caller's again.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}, must be at least 0")
        parts: list[bytes] = []
        wanted = operator.index(num_tokens) * SLOT_BYTES
        while wanted and (leaf := self._root.newer) is not self._root:
            size = len(leaf.slots)
            parts.append(self._remove(leaf) if size <= wanted else self._trim(leaf, wanted))
            wanted -= min(size, wanted)
        return _as_slots(parts)

    def clear(self) -> Slots:
        """Make everything held so far unreachable; returns the slots no pin protects.

        Pinned paths stay intact for their readers. They still count as held, match nothing, and
        once unpinned go the way of all nodes, through `evict`. Whoever holds KV computed before
        a clear must not insert it afterwards.
        """
        freed = self.evict(self.num_tokens)
        detached = list(self._root.children.values())
        self._root.children.clear()
        for node in detached:
            node.key = object()
            self._root.children[node.key] = node
        return freed

    def check_integrity(self) -> None:
        """Raise AssertionError if any invariant is broken. Visits every node and slot."""
        nodes = list(self._walk())
        for node in nodes:
            check_node(node, is_root=node is self._root)
        assert self.num_nodes == len(nodes) - 1, "num_nodes differs from a walk"
        assert self.num_tokens == sum(len(n.edge) for n in nodes) // TOKEN_BYTES, "num_tokens"
        owned = _as_slots([node.slots for node in nodes])
        assert len(np.unique(owned)) == len(owned), "a slot belongs to two tokens"
        self._check_list(nodes)

    def _descend(self, data: bytes, extra: Hashable) -> tuple[Node, int, list[bytes]]:
        """The node where the longest match ends, its length in token bytes, its slots by node."""
        node, known, parts = self._root, 0, list[bytes]()
        key = _root_key(data, extra)
        while (child := node.children.get(key)) is not None:
            whole = data.startswith(child.edge, known)
            node = child if whole else self._split(child, common_bytes(data, known, child.edge))
            known += len(node.edge)
            parts.append(node.slots)
            if not whole:
                break
            key = data[known : known + TOKEN_BYTES]
        return node, known, parts

    def _split(self, lower: Node, at: int) -> Node:
        """Cut `at` bytes off the head of an edge; the node itself stays the tail. The new head
        is locked like the tail, and enters the eviction list by the use that follows."""
        parent = lower.parent
        assert parent is not None
        upper = Node(lower.key, lower.edge[:at], lower.slots[: at * 2], parent)
        upper.locks = lower.locks
        parent.children[upper.key] = upper
        lower.edge, lower.slots, lower.parent = lower.edge[at:], lower.slots[at * 2 :], upper
        lower.key = lower.edge[:TOKEN_BYTES]
        upper.children[lower.key] = lower
        self.num_nodes += 1
        return upper

    def _add_leaf(self, parent: Node, edge: bytes, slots: bytes, extra: Hashable) -> Node:
        key = _root_key(edge, extra) if parent is self._root else edge[:TOKEN_BYTES]
        leaf = Node(key, edge, slots, parent)
        parent.children[key] = leaf
        self.num_nodes += 1
        self.num_tokens += len(edge) // TOKEN_BYTES
        return leaf

    def _use(self, node: Node) -> None:
        """Move the path to the recent end, deepest first: children before parents, always."""
        end = self._root
        for used in path_of(node):
            if not used.locks:
                unlink(used)
                link_before(end, used)

    def _remove(self, leaf: Node) -> bytes:
        parent = leaf.parent
        assert parent is not None
        unlink(leaf)
        del parent.children[leaf.key]
        # A handle that outlives its node must keep no other node alive.
        leaf.parent, leaf.older, leaf.newer = None, self._root, self._root
        self.num_nodes -= 1
        self.num_tokens -= len(leaf.edge) // TOKEN_BYTES
        return leaf.slots

    def _trim(self, leaf: Node, slot_bytes: int) -> bytes:
        kept = len(leaf.slots) - slot_bytes
        freed = leaf.slots[kept:]
        leaf.slots, leaf.edge = leaf.slots[:kept], leaf.edge[: kept // 2]
        self.num_tokens -= slot_bytes // SLOT_BYTES
        return freed

    def _check_held(self, node: Node) -> None:
        if node.parent is None and node is not self._root:
            raise ValueError("node is no longer in the tree: it was evicted after it was matched")

    def _walk(self) -> Iterator[Node]:
        """Every node, parents before children, the root first."""
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def _check_list(self, nodes: list[Node]) -> None:
        position: dict[int, int] = {}
        node = self._root.newer
        while node is not self._root:
            assert node.newer.older is node, "eviction list: links do not agree"
            assert id(node) not in position, "eviction list: a loop"
            position[id(node)] = len(position)
            node = node.newer
        unlocked = {id(n) for n in nodes if not n.locks} - {id(self._root)}
        assert position.keys() == unlocked, "eviction list is not the nodes without a lock"
        for n in nodes:
            for child in n.children.values():
                if not n.locks and n is not self._root:
                    assert position[id(child)] < position[id(n)], "a parent goes before its child"


def _depth(node: Node) -> int:
    return sum(len(held.edge) for held in path_of(node)) // TOKEN_BYTES


def _root_key(data: bytes, extra: Hashable) -> Hashable:
    first = data[:TOKEN_BYTES]
    return first if extra is None else (extra, first)


def _token_bytes(tokens: Tokens | bytes) -> bytes:
    if isinstance(tokens, bytes):
        if len(tokens) % TOKEN_BYTES:
            raise ValueError(f"tokens are {len(tokens)} bytes, must be whole int32")
        return tokens
    return bytes(int32_bytes(tokens, 0, len(tokens), 256))


def _slot_bytes(slots: npt.ArrayLike, num_tokens: int) -> bytes:
    array = np.asarray(slots)
    if array.shape != (num_tokens,):
        raise ValueError(f"slots have shape {array.shape}, must be ({num_tokens},) like tokens")
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"slots have dtype {array.dtype}, must be integers")
    if array.size and array.min() < 0:
        at = int(np.argmax(array < 0))
        raise ValueError(f"slot {at} is {array[at]}, must be at least 0")
    return array.astype(np.int64, copy=False).tobytes()


def _as_slots(parts: list[bytes]) -> Slots:
    return np.frombuffer(bytearray().join(parts), np.int64)
