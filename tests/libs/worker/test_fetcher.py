"""How far a worker follows its store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.engine.pages import PagePool
from penstock.kv.client.reading import Leased
from penstock.runtime.metrics import WorkerMetrics
from penstock.worker.fetching import Fetcher
from penstock.worker.stored import StoredKeys


class SlowStore:
    """Gives ten blocks at a time, and says that more are on their way until there are none."""

    connected = True
    attachment = "one"

    def __init__(self, blocks: int) -> None:
        self.left = blocks
        self.leases = 0

    @asynccontextmanager
    async def lease(self, keys: Sequence[bytes], origin: Any, **how: Any) -> AsyncIterator[Leased]:
        self.leases += 1
        given = min(10, self.left, len(keys))
        self.left -= given
        leased = Leased([memoryview(bytes(8))] * given, ["remote"] * given, more=self.left > 0)
        yield leased


class Pages:
    """A PageWriter of an engine that has the first `here` blocks, and keeps count of what it is told."""

    def __init__(self, here: int = 0) -> None:
        self.here = here
        self.intact = 0

    async def take(self, first: int, blocks: int) -> int:
        return max(0, min(self.here, blocks) - first)

    def settled(self, blocks: int) -> None:
        self.intact = blocks

    async def write(self, first: int, blocks: Sequence[Any], check: Any) -> int:
        return len(blocks)


def fetcher(store: SlowStore, cost: Callable[[int], float]) -> Fetcher:
    metrics = WorkerMetrics()
    return Fetcher(
        store=store,  # type: ignore[arg-type]
        metrics=metrics,
        known=StoredKeys(store, PagePool(1), metrics),  # type: ignore[arg-type]
        keys=[bytes(32)] * 100,
        block_size=16,
        cost=cost,
    )


@pytest.mark.parametrize(("cost", "loaded"), [(10.0, 100), (0.0, 10)], ids=["dear to compute", "of unknown cost"])
async def test_what_is_on_its_way_is_waited_for_while_that_is_quicker_than_to_compute(cost: float, loaded: int) -> None:
    store = SlowStore(100)
    one = fetcher(store, lambda first_token: cost)
    assert await one.upto(100, Pages()) is (loaded == 100)  # type: ignore[arg-type]
    assert one.blocks == loaded
    assert one.used(loaded * 16) == {"remote": loaded * 16}


async def test_what_is_not_on_its_way_is_not_waited_for() -> None:
    store = SlowStore(15)
    one = fetcher(store, lambda first_token: 10.0)
    assert not await one.upto(100, Pages())  # type: ignore[arg-type]
    assert (one.blocks, store.leases) == (15, 2)


async def test_used_tokens_are_counted_by_tier_and_none_that_were_not_fetched() -> None:
    one = fetcher(SlowStore(3), lambda first_token: 0.0)
    await one.upto(3, Pages())  # type: ignore[arg-type]
    assert [one.used(tokens).total() for tokens in (0, 1, 16, 47, 48, 49)] == [0, 1, 16, 47, 48, 48]


async def test_what_the_engine_has_is_not_fetched() -> None:
    store, pages = SlowStore(100), Pages(here=7)
    one = fetcher(store, lambda first_token: 10.0)
    assert await one.upto(5, pages)  # type: ignore[arg-type]
    assert (one.blocks, store.leases, pages.intact) == (5, 0, 5)
    assert await one.upto(20, pages)  # type: ignore[arg-type]
    assert (one.blocks, store.leases, pages.intact) == (20, 2, 20)
    assert one.used(20 * 16) == {"worker": 7 * 16, "remote": 13 * 16}
    assert one.stored == 0, "a sink reports what the store may lack"
