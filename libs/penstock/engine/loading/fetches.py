"""Which blocks the loads of an engine are fetching, so that each is fetched once for all who want it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


class BlockFetch:
    """Blocks that one load is fetching."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.over = asyncio.Event()
        """Set when the blocks are there, or will not come."""


class Fetches:
    """The fetches under way. Belongs to the event loop."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, BlockFetch] = {}

    def __len__(self) -> int:
        """Blocks that are being fetched."""
        return len(self._by_key)

    def of(self, key: bytes) -> BlockFetch | None:
        """The fetch that brings the block, or None."""
        return self._by_key.get(key)

    def begin(self, keys: Sequence[bytes]) -> BlockFetch:
        """A fetch of these blocks, for whom others may wait; the caller must end it."""
        fetch = BlockFetch(keys)
        for key in keys:
            self._by_key.setdefault(key, fetch)
        return fetch

    def end(self, fetch: BlockFetch) -> None:
        """The fetch is over, whatever it brought; a second call does nothing."""
        for key in fetch.keys:
            if self._by_key.get(key) is fetch:
                del self._by_key[key]
        fetch.over.set()
