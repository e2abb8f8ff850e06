"""What steps still have to compute of prompts: each block once, however many sequences wait for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.engine.pages import PagePool
from penstock.engine.scheduling.live import Live
from penstock.kv.identity import Chain


@dataclass(slots=True)
class _Part:
    """The blocks that a sequence still needs and that others may compute for it: `first` to `last` of the chain."""

    chain: Chain | None
    first: int
    last: int

    def keys(self) -> Iterable[bytes]:
        return () if self.chain is None else self.chain.keys[self.first : self.last]


class Outstanding:
    """The prompt tokens ahead of a new sequence. A NameWatcher.

    A block counts while a sequence needs it and no page holds it. A sequence's tokens behind its last such block are
    its own, and count for it. The cost of a call is that of the blocks which it adds or takes out.
    """

    def __init__(self, pool: PagePool, block_size: int) -> None:
        self._pool = pool
        self._size = block_size
        self._needed: Counter[bytes] = Counter()
        """Blocks, by the number of sequences that need them."""
        self._missing = 0
        """Those of them that no page holds."""
        self._parts: dict[Live, _Part] = {}
        pool.watch(self)

    def __contains__(self, live: Live) -> bool:
        return live in self._parts

    @property
    def tokens(self) -> int:
        """To be computed, those of the step in progress included."""
        begun: dict[bytes, int] = {}
        own = 0
        for live, part in self._parts.items():
            own += live.length - max(live.computed, part.last * self._size)
            done = live.computed % self._size
            if done and part.chain is not None and part.first < part.last:
                key = part.chain.keys[part.first]
                if self._pool.find(key) is None:
                    begun[key] = max(done, begun.get(key, 0))
        return self._missing * self._size + own - sum(begun.values())

    def follow(self, live: Live) -> None:
        """Counts what is left of a sequence's tokens; call it again when more are computed, or fewer."""
        chain, first = live.chain, live.computed // self._size
        last = first if chain is None else max(first, min(len(chain.keys), (live.length - 1) // self._size))
        part = self._parts.get(live)
        if part is None or part.chain is not chain or part.last != last or first < part.first:
            self.leave(live)
            part = self._parts[live] = _Part(chain, first, last)
            self._need(part.keys())
        elif chain is not None and first > part.first:
            self._need_no_more(chain.keys[part.first : first])
            part.first = first

    def leave(self, live: Live) -> None:
        """Nothing of the sequence is left to compute, or nobody wants it; a second call does nothing."""
        part = self._parts.pop(live, None)
        if part is not None:
            self._need_no_more(part.keys())

    def block_named(self, key: bytes) -> None:
        """The block need not be computed any more."""
        self._missing -= key in self._needed

    def block_forgotten(self, key: bytes) -> None:
        """Whoever needs the block has it computed again."""
        self._missing += key in self._needed

    def _need(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._missing += key not in self._needed and self._pool.find(key) is None
            self._needed[key] += 1

    def _need_no_more(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._needed[key] > 1:
                self._needed[key] -= 1
            else:
                del self._needed[key]
                self._missing -= self._pool.find(key) is None
