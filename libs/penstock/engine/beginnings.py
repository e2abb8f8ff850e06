"""Pages by the tokens in them: which page has the most in common with a block that begins."""

from __future__ import annotations

from bisect import bisect_left, insort

from penstock.kv.identity import TOKEN_BYTES


class Beginnings:
    """The rows of pages that others may copy: all of a full block, or the leading ones of a block that is not full.

    Tokens are packed as `penstock.kv.identity` packs them. Those behind the same block stand in lexicographic order, so
    that whoever has the longest beginning in common with some tokens is next to the place where these would stand: a
    call costs O(log n) comparisons of the n pages behind one block.
    """

    def __init__(self) -> None:
        self._behind: dict[bytes, list[tuple[bytes, int]]] = {}
        """(Tokens, page), by the key of the block before."""
        self._rows: dict[int, tuple[bytes, bytes, bytes]] = {}
        """(Key of the block before, tokens, namespace), by page."""
        self._of: dict[bytes, set[int]] = {}
        """Pages by namespace."""

    def __contains__(self, page: int) -> bool:
        return page in self._rows

    def put(self, page: int, parent: bytes, tokens: bytes, namespace: bytes = b"") -> None:
        """Says that the first rows of `page` are those of `tokens`, which follow the block of `parent`, of a tenant's
        namespace. Replaces what was said of the page before. Nobody writes to these rows until they are removed."""
        assert tokens, f"page {page} has no rows"
        self.remove(page)
        self._rows[page] = parent, tokens, namespace
        self._of.setdefault(namespace, set()).add(page)
        insort(self._behind.setdefault(parent, []), (tokens, page))

    def of(self, namespace: bytes) -> list[int]:
        """The pages with rows of a namespace."""
        return list(self._of.get(namespace, ()))

    def remove(self, page: int) -> None:
        """Nobody may copy rows of the page any more; a second call does nothing."""
        parent, tokens, namespace = self._rows.pop(page, (b"", b"", b""))
        if tokens:
            self._of[namespace].remove(page)
            if not self._of[namespace]:
                del self._of[namespace]
            behind = self._behind[parent]
            del behind[bisect_left(behind, (tokens, page))]
            if not behind:
                del self._behind[parent]

    def longest(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """(A page with the most leading rows that are those of `tokens` behind the block of `parent`, number of these
        rows); page 0 and no rows when there is none."""
        behind = self._behind.get(parent, [])
        at = bisect_left(behind, (tokens, 0))
        found = [(_common(theirs, tokens), page) for theirs, page in behind[max(0, at - 1) : at + 1]]
        rows, page = max(found, default=(0, 0))
        return (page, rows) if rows else (0, 0)

    def repeated(self, page: int) -> bool:
        """Whether another page has all rows of this one as well."""
        parent, tokens, _ = self._rows[page]
        behind = self._behind[parent]
        at = bisect_left(behind, (tokens, page))
        return (at > 0 and behind[at - 1][0] == tokens) or (
            at + 1 < len(behind) and behind[at + 1][0].startswith(tokens)
        )


def _common(one: bytes, other: bytes) -> int:
    """Leading tokens in common."""
    most = min(len(one), len(other))
    for at in range(0, most, TOKEN_BYTES):
        if one[at : at + TOKEN_BYTES] != other[at : at + TOKEN_BYTES]:
            return at // TOKEN_BYTES
    return most // TOKEN_BYTES
