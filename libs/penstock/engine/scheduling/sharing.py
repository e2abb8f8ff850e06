"""Pages by content: a sequence's full blocks get their keys, and it takes the pages of blocks that are there."""

from __future__ import annotations

from penstock.engine.pages import PagePool
from penstock.engine.scheduling.live import Live


class Sharing:
    """Names and shares the pages of sequences that have a chain; those of others stay their own."""

    def __init__(self, pool: PagePool, block_size: int) -> None:
        self._pool = pool
        self._size = block_size

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
            there = self._pool.name(page, chain.keys[block], chain.parent(block), first)
            if there != page:
                self._replace(live, block, [there])
                changed = True
        live.named = whole
        if changed:
            live.pages_changed()

    def take(self, live: Live, first: int, blocks: int) -> int:
        """Makes the sequence share the pages of its blocks from `first` on, up to the first block that is not there, or
        to the first `blocks`; returns how many it shares now. Pages that it had for them are given back. The sequence
        always computes its last token, so no block with that token is shared."""
        chain = live.chain
        if chain is None:
            return 0
        most = min(blocks, len(chain.keys), (live.length - 1) // self._size)
        found = []
        for block in range(first, most):
            page = self._pool.find(chain.keys[block])
            if page is None:
                break
            found.append(page)
        if found:
            self._replace(live, first, found)
            live.named = first + len(found)
            live.pages_changed()
        return len(found)

    def advance(self, live: Live) -> bool:
        """Makes the sequence go on behind all blocks that are there already, instead of computing them; whether there
        was one."""
        if live.remaining <= 1:
            return False
        first = live.computed // self._size
        taken = self.take(live, first, live.length)
        if taken:
            live.computed = (first + taken) * self._size
        return taken > 0

    def forget(self, live: Live) -> None:
        """Takes the keys of the sequence's pages, whose KV may be damaged."""
        self._pool.forget(live.pages[: live.named])

    def _replace(self, live: Live, first: int, pages: list[int]) -> None:
        behind = first + len(pages)
        own = live.pages[first:behind]
        self._pool.share(live.owner, pages)
        self._pool.release(live.owner, own)
        live.pages[first:behind] = pages
