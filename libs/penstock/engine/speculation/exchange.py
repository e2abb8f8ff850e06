"""What a draft model says of its blocks to whoever has a store for it, and the pages that are held for them."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine.pages import PagePool
from penstock.engine.speculation.leads import BlockMove, DraftBlockNews, DraftBlocks


class BlockExchange:
    """Collects what there is to say until a step says it. Belongs to the model's thread."""

    def __init__(self, pool: PagePool) -> None:
        """Follows the pool, as a NameWatcher."""
        self._pool = pool
        self._loans = 0
        self._lacking: list[DraftBlocks] = []
        self._full: list[DraftBlocks] = []
        self._moves: list[BlockMove] = []
        pool.watch(self)

    def take(self) -> DraftBlockNews:
        """All since the last call."""
        news = DraftBlockNews(self._lacking, self._full, self._moves)
        self._lacking, self._full, self._moves = [], [], []
        return news

    def block_named(self, key: bytes) -> None:
        """A page holds the block from now on."""
        self._moves.append((key, "named"))

    def block_forgotten(self, key: bytes) -> None:
        """No page holds it any more."""
        self._moves.append((key, "forgotten"))

    def came(self, keys: Iterable[bytes]) -> None:
        """The store had these blocks, which are named by now."""
        self._moves += [(key, "stored") for key in keys]

    def holder(self) -> str:
        """A name that nobody has."""
        self._loans += 1
        return f"loan {self._loans}"

    def lack(self, blocks: DraftBlocks) -> None:
        """The store may have these blocks; their pages are held until they are given back."""
        self._pool.hold(blocks.holder, blocks.pages)
        self._lacking.append(blocks)

    def offer(self, blocks: DraftBlocks) -> None:
        """The store may take these blocks; their pages are held until they are given back."""
        self._pool.hold(blocks.holder, blocks.pages)
        self._full.append(blocks)

    def give_back(self, blocks: DraftBlocks) -> None:
        """Nobody reads their pages any more, or writes to them."""
        self._pool.release(blocks.holder, blocks.pages)
