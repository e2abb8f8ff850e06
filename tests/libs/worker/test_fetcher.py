"""How far a worker follows its store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.engine.pages import PagePool
from penstock.kv.client.reading import Leased
from penstock.runtime.metrics import WorkerMetrics
from penstock.worker import fetching
from penstock.worker.fetching import Fetcher, StoredPrefix
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

    async def take(self, first: int, blocks: int, within_s: float | None = None) -> int:
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


class AskedStore(SlowStore):
    """Hears of uses; lacks the block with this key."""

    def __init__(self, lacks: bytes) -> None:
        super().__init__(0)
        self.lacks, self.heard = lacks, 0

    async def touch(self, used: Sequence[tuple[str, Sequence[bytes]]]) -> list[bytes]:
        self.heard += 1
        return [key for _, keys in used for key in keys if key == self.lacks]


@pytest.mark.parametrize("hands_on", [True, False])
async def test_who_hands_blocks_on_believes_the_store_alone(hands_on: bool) -> None:
    """What the worker remembers of its store may be old: another worker would miss the blocks behind the first gap."""
    keys = [number.to_bytes(32) for number in range(8)]
    store, pool, told = AskedStore(keys[5]), PagePool(8), list[int]()
    for page, key in zip(pool.allocate("a", 8), keys, strict=True):
        pool.name(page, key, key, 0)
    one = fetcher(store, lambda first_token: 10.0)
    one.known, one.keys, one.hands_on = StoredKeys(store, pool, one.metrics), keys, hands_on  # type: ignore[arg-type]
    one.known.learn(keys)
    result = await StoredPrefix(one, 8, told.append).load(Pages(here=8))  # type: ignore[arg-type]
    stored = 5 if hands_on else 8
    assert (told, result.stored_blocks, result.valid_tokens) == ([stored], stored, 8 * 16)
    assert store.heard == hands_on


class PacedStore(SlowStore):
    """Brings a block every `block_s` of a clock of its own, from its beginning on."""

    def __init__(self, blocks: int, block_s: float) -> None:
        super().__init__(blocks)
        self.block_s = block_s
        self.given = 0
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    @asynccontextmanager
    async def lease(
        self, keys: Sequence[bytes], origin: Any, *, wait_s: float = 0.0, **how: Any
    ) -> AsyncIterator[Leased]:
        wanted = min(self.left, len(keys))
        begun = self.given * self.block_s
        needs_s = max(0.0, begun + wanted * self.block_s - self.now)
        self.now += min(wait_s, needs_s) if wait_s else needs_s
        given = min(wanted, int((self.now - begun) / self.block_s + 1e-9))
        self.left, self.given = self.left - given, self.given + given
        yield Leased([memoryview(bytes(8))] * given, ["nvme"] * given, more=0 < given < len(keys))


BLOCK_S = 0.01
"""To compute a block."""


async def paced(store: PacedStore, monkeypatch: pytest.MonkeyPatch, *, queue_s: float = 0.0) -> tuple[int, float]:
    """Blocks that were fetched of a hundred, and the seconds until all are there."""
    monkeypatch.setattr(fetching, "time", store)
    one = fetcher(store, lambda first_token: BLOCK_S)
    one.queue_s = lambda: queue_s
    await one.upto(100, Pages(), compares=True)  # type: ignore[arg-type]
    return one.blocks, max(store.now, queue_s) + (100 - one.blocks) * BLOCK_S


@pytest.mark.parametrize("times", [0.01, 0.5, 0.8, 1.5, 2.0, 10.0, 1e9])
async def test_a_slow_disk_costs_little_more_than_to_compute(times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the better of both: all is fetched, or all is computed. The last few are as one likes."""
    blocks, seconds = await paced(PacedStore(100, times * BLOCK_S), monkeypatch)
    assert (blocks > 90) == (times < 1)
    assert seconds <= 1.26 * 100 * BLOCK_S * min(times, 1.0)


async def test_what_takes_long_comes_while_others_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = PacedStore(100, 2 * BLOCK_S)
    assert await paced(store, monkeypatch, queue_s=3.0) == (100, pytest.approx(3.0))


class Occupied(Pages):
    """Of an engine in which another load fetches all blocks and never has them; also the clock, which only waits for
    that load move on."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def take(self, first: int, blocks: int, within_s: float | None = None) -> int:
        self.waits.append(within_s)
        self.now += within_s or 0.0
        return 0


@pytest.mark.parametrize("compares", [True, False])
async def test_what_another_load_fetches_is_waited_for_once(compares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the store may take to bring it. Then the store is asked for all of it."""
    store, pages = SlowStore(100), Occupied()
    monkeypatch.setattr(fetching, "time", pages)
    one = fetcher(store, lambda first_token: BLOCK_S)
    one.queue_s = lambda: 0.5
    assert await one.upto(100, pages, compares=compares)  # type: ignore[arg-type]
    assert one.used(100 * 16) == {"remote": 100 * 16}
    assert pages.waits == ([pytest.approx(0.5 + 25 * BLOCK_S), *[0.0] * 9] if compares else [None] * 10)


async def test_who_hands_off_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = PacedStore(100, 50 * BLOCK_S)
    monkeypatch.setattr(fetching, "time", store)
    assert await fetcher(store, lambda first_token: BLOCK_S).upto(100, Pages())  # type: ignore[arg-type]
