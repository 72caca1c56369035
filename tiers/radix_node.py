"""A node of the radix tree, its place in the eviction list, and what must hold of it by itself."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

TOKEN_BYTES = 4
SLOT_BYTES = 8


class Node:
    """A handle for `pin` and `unpin`; its fields belong to the tree.

    edge, slots: packed int32 tokens and int64 slots, one slot per token. key: the parent's name
    for this node. pins: by callers, of this node. locks: pins here and anywhere below; a node is
    in the eviction list (older, newer) exactly while it has none. The root has none ever.
    """

    __slots__ = (
        "children",
        "edge",
        "key",
        "locks",
        "newer",
        "older",
        "parent",
        "pins",
        "slots",
    )

    def __init__(self, key: Hashable, edge: bytes, slots: bytes, parent: Node | None) -> None:
        self.key = key
        self.edge = edge
        self.slots = slots
        self.parent = parent
        self.children: dict[Hashable, Node] = {}
        self.pins = 0
        self.locks = 0
        self.older: Node = self
        self.newer: Node = self


def path_of(node: Node) -> Iterator[Node]:
    """The node and its ancestors below the root, deepest first."""
    while (parent := node.parent) is not None:
        yield node
        node = parent


def unlink(node: Node) -> None:
    node.older.newer = node.newer
    node.newer.older = node.older


def link_before(newer: Node, node: Node) -> None:
    older = newer.older
    node.older, node.newer = older, newer
    older.newer = newer.older = node


def common_bytes(data: bytes, start: int, edge: bytes) -> int:
    """Length in bytes of the longest common head, in whole tokens, of data[start:] and edge."""
    size = min(len(data) - start, len(edge)) // TOKEN_BYTES
    a = np.frombuffer(data, np.int32, size, offset=start)
    differ = a != np.frombuffer(edge, np.int32, size)
    return TOKEN_BYTES * (int(differ.argmax()) if differ.any() else size)


def check_node(node: Node, *, is_root: bool) -> None:
    assert is_root == (node.parent is None), "a held node has no parent"
    assert is_root == (not node.edge), "an edge is empty"
    assert len(node.edge) % TOKEN_BYTES == 0, "an edge ends inside a token"
    assert len(node.slots) == 2 * len(node.edge), "slots and tokens differ in number"
    locks = node.pins + sum(child.locks for child in node.children.values())
    assert is_root or node.locks == locks, "locks are not the pins here and below"
    for key, child in node.children.items():
        assert child.parent is node, "a child names another parent"
        assert child.key == key, "a child is filed under another key"
        first = child.edge[:TOKEN_BYTES]
        assert key == first or is_root, "a child is filed under another token"
        if is_root and isinstance(key, tuple):
            assert key[1] == first, "a child with an extra key is filed under another token"
