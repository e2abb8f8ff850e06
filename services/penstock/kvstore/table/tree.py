"""Which block follows which: the prefix tree of one table.

A block is evicted only after all that follow it, so a circle of parents would stay for ever. None can come about:
`circle` finds the block that would close one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.kvstore.table.blocks import Block

Parents = Callable[[bytes], bytes | None]
"""The parent of a block that is in the table; None: it is not."""


class Tree:
    """Counts children, by the key of their parent, which need not be in the table itself."""

    def __init__(self) -> None:
        self._children: dict[bytes, int] = {}

    def __contains__(self, key: bytes) -> bool:
        """Whether a block has children."""
        return key in self._children

    def add(self, parent: bytes) -> None:
        """One child more."""
        self._children[parent] = self._children.get(parent, 0) + 1

    def drop(self, parent: bytes) -> bool:
        """One child less; whether it was the last."""
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
        else:
            del self._children[parent]
        return not left


def circle(
    wanted: Iterable[tuple[bytes, bytes]], parent_of: Parents, has_children: Callable[[bytes], bool]
) -> int | None:
    """The index of the first of `wanted`, pairs of a key and its parent, that would follow itself; None: none does.

    Those in the table count as they are there, and those of `wanted` in their order. Only a block that has children
    already can close a circle, and blocks come after their parents, so hardly ever is there a way up to be walked;
    and a call walks every step once.
    """
    new: dict[bytes, bytes] = {}
    named: set[bytes] = set()
    skips: dict[bytes, bytes] = {}
    for index, (key, parent) in enumerate(wanted):
        if key in new or parent_of(key) is not None:
            continue
        if key == parent:
            return index
        if (key in named or has_children(key)) and _top(parent, parent_of, new, skips) == key:
            return index
        new[key] = parent
        named.add(parent)
    return None


def _top(key: bytes, parent_of: Parents, new: dict[bytes, bytes], skips: dict[bytes, bytes]) -> bytes:
    """The first key above `key`, itself included, that has no parent; remembers the way in `skips`."""
    passed = []
    while (above := skips.get(key) or new.get(key) or parent_of(key)) is not None:
        passed.append(key)
        key = above
    for one in passed:
        skips[one] = key
    return key


def without_circles(blocks: Sequence[Block]) -> list[Block]:
    """The blocks in their order, without those that are their own ancestors."""
    parents = {block.key: block.parent for block in blocks}
    fine: set[bytes] = set()
    turning: set[bytes] = set()
    for block in blocks:
        way: dict[bytes, None] = {}
        key = block.key
        while key in parents and key not in way and key not in fine and key not in turning:
            way[key] = None
            key = parents[key]
        passed = list(way)
        first = passed.index(key) if key in way else len(passed)
        fine.update(passed[:first])
        turning.update(passed[first:])
    return [block for block in blocks if block.key in fine]
