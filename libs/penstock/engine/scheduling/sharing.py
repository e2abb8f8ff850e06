"""Pages by content: a sequence's full blocks get their keys, and it takes the pages of blocks that are there.

Where its next block is not there as a whole, but its leading tokens are, it copies their rows to a page of its own.
Pages with the far part of a block alone (see penstock.kv.parts) are for sequences that go on far enough behind it.
"""

from __future__ import annotations

from penstock.engine.pages import PagePool
from penstock.engine.scheduling.live import Live, Standstill
from penstock.kv.identity import packed
from penstock.kv.parts import Reach, far_key


class Sharing:
    """Names and shares the pages of sequences that have a chain; those of others stay their own."""

    def __init__(self, pool: PagePool, block_size: int, reach: Reach | None = None) -> None:
        """`reach` is that of the layers that forget; None: there are none."""
        self._pool = pool
        self._reach = reach
        self._size = block_size
        self._least = max(1, block_size // 4)
        """Fewer tokens are computed: nearly all prompts have one or two in common."""

    def name(self, live: Live, tokens: int) -> None:
        """Gives the pages of the first `tokens` tokens their keys, as far as the blocks are full; nobody writes to them
        again. Their KV is computed, or loaded and intact, and finite. Where another page holds such a block, the
        sequence uses that one instead."""
        chain, whole = live.chain, tokens // self._size
        if chain is None or whole <= live.named:
            return
        chain.cover(live.tokens)
        changed = False
        for block in range(live.named, whole):
            page, first = live.pages[block], block * self._size
            there = self._name(live, block)
            if there == page and not (self._pool.far(page) or chain.touches_pictures(first, first + self._size)):
                rows = packed(live.tokens[first : first + self._size])
                self._pool.rows(page, chain.parent(block), rows, namespace=chain.root)
            if there != page:
                self._replace(live, block, [there])
                changed = True
        live.named = whole
        if changed:
            live.pages_changed()

    def _name(self, live: Live, block: int) -> int:
        """Names the page of one block; returns the page that holds it. The far part alone is worth less than what is
        whole already. A block behind such a page leaves before it does."""
        assert live.chain is not None
        page, key, parent = live.pages[block], live.chain.keys[block], live.chain.parent(block)
        if self._pool.far(page):
            whole, key = self._pool.find(key), far_key(key)
            if whole is not None:
                return whole
        if block and self._pool.far(live.pages[block - 1]):
            parent = far_key(parent)
        return self._pool.name(page, key, parent, block * self._size, namespace=live.chain.root)

    def take(self, live: Live, first: int, blocks: int, far: int | None = None) -> int:
        """Makes the sequence share the pages of its blocks from `first` on, up to the first block that is not there, or
        to the first `blocks`; returns how many it shares now. Pages that it had for them are given back. The sequence
        always computes its last token, so no block with that token is shared. Of the first `far` blocks the far part is
        enough; None: of those that the sequence does not look at when it goes on behind the last one."""
        chain = live.chain
        if chain is None:
            return 0
        most = min(blocks, self._most(live))
        found = []
        for block in range(first, most):
            page = self._pool.find(chain.keys[block])
            if page is None and self._reach is not None and (far is None or block < far):
                page = self._pool.find(far_key(chain.keys[block]))
            if page is None:
                break
            found.append(page)
        if far is None and (gaps := self._gaps(first, found)):
            live.standstill = Standstill(gaps[-1], first + len(found), gaps)
            found = found[: gaps[-1] - first]
        if found:
            self._replace(live, first, found)
            live.named = first + len(found)
            live.pages_changed()
        return len(found)

    def _most(self, live: Live) -> int:
        """How many blocks the sequence may share."""
        return 0 if live.chain is None else min(len(live.chain.keys), (live.length - 1) // self._size)

    def _gaps(self, first: int, pages: list[int]) -> list[int]:
        """Because of which blocks a sequence that has all it needs of the first `first` can't go on behind the last of
        these pages: see `Reach.gaps`."""
        if self._reach is None or not any(map(self._pool.far, pages)):
            return []
        return self._reach.gaps([True] * first + [not self._pool.far(page) for page in pages], self._size)

    def lacking(self, live: Live, blocks: int) -> int:
        """The first block whose near part is not there and would be looked at, if the sequence went on behind so many
        blocks, or computed their last token once more; `blocks` when there is none."""
        if self._reach is None:
            return blocks
        begin = self._reach.far(blocks, self._size)
        return next((block for block in range(begin, blocks) if self._pool.far(live.pages[block])), blocks)

    def reached(self, live: Live, tokens: int) -> int:
        """How many of the first `tokens` tokens, all of which are in its pages, the sequence can go on behind."""
        blocks = tokens // self._size
        gaps = self._gaps(0, live.pages[:blocks])
        return gaps[-1] * self._size if gaps else tokens

    def advance(self, live: Live) -> bool:
        """Makes the sequence go on behind all blocks that are there already, instead of computing them; whether there
        was one. Called before each step, it looks at all of them only if that may have changed."""
        if live.remaining <= 1:
            return False
        first = live.computed // self._size
        if self._stands_still(live, first):
            return False
        taken = self.take(live, first, live.length)
        if taken:
            live.computed = (first + taken) * self._size
        return taken > 0

    def _stands_still(self, live: Live, first: int) -> bool:
        """Whether a sequence that goes on at block `first` can't share it, for the reason of before. If it could go on
        behind some block up to `end`, all from `first` to that one would be whole, or one of the gaps would."""
        chain, why = live.chain, live.standstill
        if chain is None or why is None or not why.first <= first < why.end:
            return False
        if why.end < self._most(live) and self._there(chain.keys[why.end]):
            return False
        lacking = [first, *(block for block in why.gaps if block > first)]
        return all(self._pool.find(chain.keys[block]) is None for block in lacking)

    def _there(self, key: bytes) -> bool:
        """Whether a page has the block, or its far part."""
        return self._pool.find(key) is not None or self._pool.find(far_key(key)) is not None

    def leave_tail(self, live: Live) -> None:
        """Lets others copy what the sequence's last page holds of a block that is not full, when the blocks before have
        their keys. Its KV is computed, or loaded and intact, and finite."""
        first = live.named * self._size
        if live.chain is None or live.chain.touches_pictures(first, live.computed):
            return
        if first < live.computed < first + self._size:
            rows = packed(live.tokens[first : live.computed])
            parent, root = live.chain.parent(live.named), live.chain.root
            self._pool.rows(live.pages[live.named], parent, rows, namespace=root)

    def copyable(self, live: Live) -> int:
        """How many tokens of its next block the sequence can copy instead of computing them."""
        return self._beginning(live)[1]

    def borrow(self, live: Live) -> tuple[int | None, int]:
        """Holds for the sequence the page from which it copies tokens of its next block; returns the page and how many
        they are, None and 0 when there is none. The caller must release it."""
        page, rows = self._beginning(live)
        if not rows:
            return None, 0
        self._pool.borrow(live.owner, page)
        return page, rows

    def _beginning(self, live: Live) -> tuple[int, int]:
        """(A page, leading tokens of the sequence's next block that are in it and need not be computed)."""
        block, inside = divmod(live.computed, self._size)
        if live.chain is None or inside or block > len(live.chain.keys):
            return 0, 0
        most = min(self._size, live.remaining) - 1
        if live.chain.touches_pictures(live.computed, live.computed + most):
            return 0, 0
        wanted = live.tokens[live.computed : live.computed + most]
        page, rows = self._pool.longest(live.chain.parent(block), packed(wanted))
        return (page, rows) if rows >= self._least else (0, 0)

    def forget(self, live: Live) -> None:
        """Takes the keys and tails of the sequence's pages, whose KV may be damaged, and of that which it copied from
        in its last step."""
        self._pool.forget(live.pages)
        if live.run.source is not None:
            self._pool.forget((live.run.source,))

    def _replace(self, live: Live, first: int, pages: list[int]) -> None:
        behind = first + len(pages)
        own = live.pages[first:behind]
        self._pool.share(live.owner, pages)
        self._pool.release(live.owner, own)
        live.pages[first:behind] = pages
