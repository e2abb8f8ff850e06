"""Sequences that stand still before blocks that are there, as some have no near part: few are looked at again."""

from __future__ import annotations

import random

import pytest

from penstock.engine.pages import PagePool
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.live import new_live
from penstock.engine.scheduling.sharing import Sharing
from penstock.kv.identity import Chain
from penstock.kv.parts import Reach, far_key

SIZE = 16


class CountingPool(PagePool):
    """Counts what it is asked."""

    looked_up = 0

    def find(self, key: bytes) -> int | None:
        self.looked_up += 1
        return super().find(key)


class Text:
    """The pages of one text's blocks, and a sequence that computes it."""

    def __init__(self, pool: PagePool, blocks: int) -> None:
        self.pool, self.blocks = pool, blocks
        tokens = tuple(random.Random(blocks).choices(range(256), k=blocks * SIZE + 5))
        self.chain = Chain(b"r" * 32, SIZE, tokens)
        request = Request("a", tokens, SamplingParams(max_tokens=4))
        self.live = new_live(request, 0, frozenset(), chain=self.chain)

    def has(self, block: int, *, far: bool) -> None:
        """A page has the block, or its far part alone, unless one has that already."""
        key = self.chain.keys[block]
        key = far_key(key) if far else key
        if self.pool.find(key) is None and self.pool.can_allocate(1):
            page = self.pool.allocate("others", 1)
            self.pool.note_parts(page, [far])
            self.pool.name(page[0], key, self.chain.parent(block), block * SIZE)
            self.pool.release("others", page)

    def loses(self, block: int) -> None:
        for key in (self.chain.keys[block], far_key(self.chain.keys[block])):
            page = self.pool.find(key)
            if page is not None and not self.pool.holds(page):
                self.pool.forget([page])

    def computes(self) -> None:
        """The sequence's next block."""
        live = self.live
        live.pages += self.pool.allocate(live.owner, 1)
        self.pool.note_parts(live.pages[-1:], [False])
        live.computed += SIZE

    def begins_anew(self) -> None:
        """The sequence has lost its pages."""
        live = self.live
        self.pool.release(live.owner, live.pages)
        live.pages.clear()
        live.named = live.computed = 0


@pytest.mark.parametrize("reach", [Reach(1024), Reach(1024, chunked=True)])
def test_a_long_prefix_of_far_parts_is_looked_at_once(reach: Reach) -> None:
    pool = CountingPool(2200)
    text = Text(pool, 2000)
    for block in range(2000):
        text.has(block, far=True)
    sharing = Sharing(pool, SIZE, reach)
    pool.looked_up = 0
    assert not sharing.advance(text.live)
    assert pool.looked_up >= 2000
    for _ in range(100):
        before = pool.looked_up
        text.computes()
        sharing.name(text.live, text.live.computed)
        named = pool.looked_up
        assert not sharing.advance(text.live)
        assert pool.looked_up - named <= 2000 * SIZE // reach.tokens + 3 and named - before <= 3


@pytest.mark.parametrize("seed", range(60))
def test_it_takes_what_one_takes_that_looks_at_everything(seed: int) -> None:
    luck = random.Random(seed)
    pool = PagePool(200)
    text = Text(pool, 40)
    live, reach = text.live, Reach(luck.choice([1, 20, 64, 100]), luck.random() < 0.5)
    sharing = Sharing(pool, SIZE, reach)
    for block in range(luck.randrange(41)):
        text.has(block, far=luck.random() < 0.8)
    while live.computed // SIZE < 40:
        for _ in range(luck.randrange(8)):
            what, block = luck.random(), luck.randrange(40)
            if what < 0.1:
                text.loses(block)
            else:
                text.has(block, far=what < 0.6)
        if luck.random() < 0.05:
            text.begins_anew()
        before, expected = live.computed // SIZE, longest(text, reach)
        assert sharing.advance(live) == (expected > before)
        assert live.computed // SIZE == expected
        if expected < 40:
            text.computes()


def longest(text: Text, reach: Reach) -> int:
    """The blocks behind which the sequence can go on."""
    first = text.live.computed // SIZE
    whole = [True] * first
    for key in text.chain.keys[first:]:
        if text.pool.find(key) is None and text.pool.find(far_key(key)) is None:
            break
        whole.append(text.pool.find(key) is not None)
    return max(end for end in range(first, len(whole) + 1) if all(whole[reach.far(end, SIZE) : end]))
