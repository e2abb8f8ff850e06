"""What a worker lends of its pages, and what it has saved before they go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from tests.services.kvstore.helpers import BLOCK_BYTES, client_of, eventually, fetch, keys, puts, settings

from penstock.engine.pages import PagePool
from penstock.kv.bytes.arena import Arena, Layout
from penstock.kv.client.client import NOBODY, BlockPut, StoreClient, StoreFault
from penstock.kv.client.lending import BlockLoan, Vouched
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.runtime.metrics import WorkerMetrics
from penstock.runtime.tasks import beside
from penstock.worker.lending import PageLending
from penstock.worker.stored import StoredKeys


@dataclass
class Page:
    """A reference to a page."""

    page: int


@dataclass
class Bench:
    """A pool of pages that its store can map, and who lends them."""

    store: StoreClient
    pages: int = 32
    most_idle: int | None = None
    arena: Arena = field(init=False)

    def __post_init__(self) -> None:
        layout = Layout.gapless(self.pages + 1, BLOCK_BYTES)
        self.arena = Arena(layout.offset(self.pages + 1))
        self.arena.format(layout)
        self.pool = PagePool(self.pages, most_idle=self.most_idle)
        self.metrics = WorkerMetrics()
        self.known = StoredKeys(self.store, self.pool, self.metrics)
        self.lending = PageLending(self.store, self.pool, self.arena, known=self.known, metrics=self.metrics)

    def compute(self, blocks: Sequence[BlockPut], owner: str = "me") -> list[int]:
        """A sequence that holds the blocks in pages under their names."""
        pages = self.pool.allocate(owner, len(blocks))
        for page, block in zip(pages, blocks, strict=True):
            self.arena.block(page, BLOCK_BYTES)[:] = block.data
            self.pool.name(page, block.key, block.parent, block.first_token)
        return pages

    async def lend(self, blocks: Sequence[BlockPut], pages: Sequence[int]) -> list[BlockPut]:
        return await self.lending.lend(blocks, [Page(page) for page in pages], NOBODY)  # type: ignore[arg-type]

    def ready(self) -> bool:
        """Whether pages can be taken and no block is lost."""
        leaving = self.pool.choose(self.pool.chosen)
        return self.lending._short(4) <= 0 and self.lending._saved.issuperset(leaving)

    def saved(self) -> float:
        return self.metrics.saved._value.get()


@asynccontextmanager
async def bench(blocks: int = 64, **more: object) -> AsyncIterator[tuple[Bench, KvStore, StoreClient]]:
    async with open_kvstore(settings(blocks)) as store:
        async with client_of(store.address) as client, client_of(store.address) as reader:
            one = Bench(client, **more)  # type: ignore[arg-type]
            async with beside(one.lending.run, name="lend", on_failure="stop", failed=one.metrics.task_failed):
                await eventually(lambda: one.lending.on)
                yield one, store, reader


def owners(store: KvStore) -> set[str]:
    found = map(store.host.lent.find, keys(5)[:4])
    return {"" if block is None else block.owner for block in found}


def fails_once(client: StoreClient, *, ended: bool) -> list[str]:
    """The next call that ends loans, or makes some, fails and leaves the client attached; returns the failures."""
    lend, failures = client.lending.lend, list[str]()

    async def lends(loans: Sequence[BlockLoan], pages: Arena, gone: Sequence[bytes] = ()) -> None:
        if (gone if ended else loans) and not failures:
            failures.append("not now")
            raise StoreFault(failures[0])
        await lend(loans, pages, gone)

    client.lending.lend = lends  # type: ignore[method-assign]
    return failures


def contents(blocks: Sequence[BlockPut]) -> list[bytes]:
    return [bytes(block.data) for block in blocks]


async def test_what_is_lent_is_found_and_not_copied() -> None:
    async with bench() as (one, store, reader):
        blocks = puts(6)
        assert await one.lend(blocks, one.compute(blocks)) == []
        assert len(one.lending) == len(store.host.lent) == 6
        assert await one.lend(blocks, one.pool.allocate("again", 6)) == [], "once is enough"
        one.pool.release("me", [one.pool.find(key) for key in keys(6)])
        assert await reader.lookup(keys(6)) == 6
        assert (store.stats().blocks, one.saved()) == (0, 0)
        assert await fetch(reader, keys(6)) == contents(blocks)


async def test_a_page_that_is_not_the_pools_own_of_its_key_is_put() -> None:
    async with bench() as (one, store, _):
        blocks = puts(2)
        one.compute(blocks)
        second = one.pool.allocate("you", 2)
        assert await one.lend(blocks, second) == blocks
        assert len(one.lending) == len(store.host.lent) == 0


async def test_blocks_are_saved_before_their_pages_are_needed() -> None:
    """Much more passes through the pages than there are, in turns of an eighth of them: nothing is lost."""
    async with bench(blocks=256, pages=64) as (one, _, reader):
        chains = [puts(4, str(number)) for number in range(40)]
        for number, chain in enumerate(chains):
            pages = one.compute(chain, str(number))
            assert await one.lend(chain, pages) == []
            one.pool.release(str(number), pages)
            await eventually(one.ready)
        assert one.lending.lost == 0
        assert len(one.lending) <= 64
        for chain in chains:
            assert await fetch(reader, [block.key for block in chain]) == contents(chain)
        assert one.saved() >= 160 - 64


async def test_few_idle_blocks_may_stay() -> None:
    """The others leave soon after they became idle, when they are saved."""
    async with bench(blocks=256, pages=64, most_idle=16) as (one, _, reader):
        chain = puts(40)
        pages = one.compute(chain)
        await one.lend(chain, pages)
        one.pool.release("me", pages)
        assert one.pool.stats().resident == 40
        await eventually(lambda: one.pool.stats().resident == 16)
        assert one.lending.lost == 0
        assert await fetch(reader, keys(40)) == contents(chain)


async def test_a_page_loses_its_epoch_before_it_can_be_written() -> None:
    async with bench(pages=4) as (one, store, reader):
        blocks = puts(3)
        pages = one.compute(blocks)
        await one.lend(blocks, pages)
        one.pool.forget(pages)
        assert not any(one.arena._epochs[page] for page in pages)
        assert one.lending.lost == 3
        assert await fetch(reader, keys(3)) == []
        await eventually(lambda: len(store.host.lent) == 0)
        assert await reader.lookup(keys(3)) == 0


async def test_a_name_that_goes_while_it_is_lent() -> None:
    """The block is not lent then, and has to be put by its owner, who still holds the page."""
    async with bench() as (one, _, reader):
        blocks = puts(2)
        pages = one.compute(blocks)
        lending = one.store.lending
        first = lending.vouch

        async def slow(those: Sequence[tuple[bytes, memoryview]]) -> list[Vouched]:
            one.pool.forget(pages[1:])
            return await first(those)

        lending.vouch = slow  # type: ignore[method-assign]
        assert await one.lend(blocks, pages) == blocks[1:]
        assert await reader.lookup(keys(2)) == 1


async def test_a_store_that_refuses_a_loan_leaves_none() -> None:
    async with bench() as (one, _, _reader):
        blocks = puts(2)
        pages = one.compute(blocks)

        async def fails(*_: object) -> None:
            raise StoreFault("no")

        one.store.lending.lend = fails  # type: ignore[method-assign, assignment]
        with pytest.raises(StoreFault):
            await one.lend(blocks, pages)
        assert len(one.lending) == 0
        assert not any(one.arena._epochs[page] for page in pages)


async def test_without_a_store_everything_is_left_to_others() -> None:
    async with open_kvstore(settings()) as store, client_of(store.address, host="elsewhere") as client:
        one = Bench(client)
        async with beside(one.lending.run, name="lend", on_failure="stop", failed=one.metrics.task_failed):
            await eventually(lambda: client.connected)
            await asyncio.sleep(0)
            blocks = puts(2)
            assert await one.lend(blocks, one.compute(blocks)) == blocks
            assert not one.lending.on


async def test_a_new_store_is_lent_what_is_there() -> None:
    async with open_kvstore(settings()) as first, client_of(first.address) as client:
        one = Bench(client)
        async with beside(one.lending.run, name="lend", on_failure="stop", failed=one.metrics.task_failed):
            await eventually(lambda: one.lending.on)
            blocks = puts(5)
            await one.lend(blocks, one.compute(blocks))
            one.pool.forget([one.pool.find(keys(5)[4])])
            client._link.lost(client._link.need(), "a test")
            await eventually(lambda: one.lending.on)
            await eventually(lambda: not first.host.lent.busy)
            await eventually(lambda: owners(first) == {client.attachment})
            assert await client.lookup(keys(5)) == 4
            assert one.known.leading(keys(5)) == 4


async def test_what_a_new_store_fails_to_take_is_lent_again() -> None:
    """Nothing happens meanwhile that would remind of it."""
    async with open_kvstore(settings()) as first, client_of(first.address) as client:
        one = Bench(client)
        async with beside(one.lending.run, name="lend", on_failure="stop", failed=one.metrics.task_failed):
            await eventually(lambda: one.lending.on)
            blocks = puts(4)
            await one.lend(blocks, one.compute(blocks))
            failures = fails_once(client, ended=False)
            client._link.lost(client._link.need(), "a test")
            await eventually(lambda: failures)
            assert not one.lending.on, "blocks are copied until the store has heard of the loans"
            await eventually(lambda: one.lending.on)
            await eventually(lambda: owners(first) == {client.attachment})
            assert one.known.leading(keys(4)) == 4


async def test_a_store_that_fails_hears_of_ended_loans_later() -> None:
    async with bench() as (one, store, _):
        blocks = puts(3)
        pages = one.compute(blocks)
        await one.lend(blocks, pages)
        failures = fails_once(one.store, ended=True)
        one.pool.forget(pages)
        await eventually(lambda: failures)
        await eventually(lambda: len(store.host.lent) == 0)
        assert one.lending.on


async def test_when_live_sequences_fill_the_pages_everything_is_saved_at_once() -> None:
    async with bench(pages=16) as (one, _, reader):
        chain = puts(16)
        pages = one.compute(chain)
        await one.lend(chain, pages)
        await eventually(lambda: one.saved() == 16)
        one.pool.release("me", pages)
        one.compute(puts(16, "b"), "you")
        assert one.lending.lost == 0
        assert await fetch(reader, keys(16)) == contents(chain)


async def test_a_pool_without_a_store_keeps_no_more_than_it_may() -> None:
    async with bench(pages=16, most_idle=4) as (one, _, _reader):
        one.store._link.lost(one.store._link.need(), "a test")
        assert not one.lending.on
        one.pool.release("me", one.compute(puts(9)))
        assert one.pool.stats().resident == 4


async def test_saved_blocks_leave_when_more_become_idle_than_may_stay() -> None:
    """Which leave next was settled before, as there were few free pages; nothing else has to be settled then."""
    async with bench(blocks=256, pages=64, most_idle=16) as (one, _, reader):
        one.pool.allocate("live", 40)
        chain, more = puts(16), puts(6, "b")
        pages = one.compute(chain)
        await one.lend(chain, pages)
        one.pool.release("me", pages)
        busy = one.compute(more, "you")
        await one.lend(more, busy)
        await eventually(lambda: one.pool.chosen == 6 and one.ready())
        assert one.pool.stats().resident == 22 and not one.pool.over
        one.pool.release("you", busy)
        await eventually(lambda: one.pool.stats().resident == 16)
        assert one.lending.lost == 0
        assert await fetch(reader, keys(16)) == contents(chain)
