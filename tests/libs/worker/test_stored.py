"""What a worker believes of its store, and what it tells the store of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from penstock.engine.pages import PagePool
from penstock.kv.client.client import StoreFault
from penstock.kv.identity import MAX_BATCH
from penstock.kv.parts import far_key
from penstock.runtime.metrics import WorkerMetrics
from penstock.runtime.tasks import beside
from penstock.worker import stored
from penstock.worker.stored import StoredKeys

KEYS = [number.to_bytes(32, "big") for number in range(5000)]


@dataclass
class Store:
    """Hears of uses; has what it was not told to lack."""

    attachment: str = "one"
    lacks: set[bytes] = field(default_factory=set)
    heard: list[dict[str, list[bytes]]] = field(default_factory=list)
    away: bool = False

    async def touch(self, used: Sequence[tuple[str, Sequence[bytes]]]) -> list[bytes]:
        if self.away:
            self.away = False
            raise StoreFault("away")
        assert 0 < sum(len(keys) for _, keys in used) <= MAX_BATCH
        self.heard.append({session: list(keys) for session, keys in used})
        return [key for _, keys in used for key in keys if key in self.lacks]


@pytest.fixture
def pool() -> PagePool:
    """Its pages hold the blocks of all keys."""
    pool = PagePool(len(KEYS))
    for page, key in zip(pool.allocate("a", len(KEYS)), KEYS, strict=True):
        pool.name(page, key, key, 0)
    return pool


@asynccontextmanager
async def telling(store: Store, pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StoredKeys]:
    monkeypatch.setattr(stored, "_PAUSE_S", 0.0)
    metrics = WorkerMetrics()
    known = StoredKeys(store, pool, metrics)  # type: ignore[arg-type]
    async with beside(known.run, name="touch", on_failure="restart", failed=metrics.task_failed):
        yield known
    assert "penstock_task_failures_total{" not in metrics.text().decode()


async def until(fact) -> None:
    async with asyncio.timeout(10):
        while not fact():
            await asyncio.sleep(0)


async def test_only_blocks_in_pages_are_known_and_those_that_leave_are_forgotten(pool: PagePool) -> None:
    known = StoredKeys(Store(), pool, WorkerMetrics())  # type: ignore[arg-type]
    assert known.leading(KEYS) == 0
    known.learn([*KEYS[:5], b"elsewhere"])
    assert (known.leading(KEYS), known.leading([b"elsewhere"])) == (5, 0)
    pool.forget([pool.find(KEYS[3])])
    assert known.leading(KEYS) == 3


async def test_a_store_that_began_anew_has_nothing(pool: PagePool) -> None:
    store = Store()
    known = StoredKeys(store, pool, WorkerMetrics())  # type: ignore[arg-type]
    known.learn(KEYS[:5])
    for attachment in ("", "two"):
        store.attachment = attachment
        assert known.leading(KEYS) == 0
    known.learn(KEYS[:2])
    assert known.leading(KEYS) == 2


async def test_uses_are_told_together_and_what_is_absent_is_forgotten(pool: PagePool, monkeypatch) -> None:
    store = Store(lacks={KEYS[4]})
    async with telling(store, pool, monkeypatch) as known:
        known.learn(KEYS[:6])
        for session in ("s", "t", "s"):
            known.used(KEYS[:6], session)
        await until(lambda: store.heard)
        assert store.heard == [{"s": KEYS[:6], "t": KEYS[:6]}]
        await until(lambda: known.leading(KEYS) == 4)
        known.used(KEYS[:1], "")
        await until(lambda: len(store.heard) == 2)


async def test_a_message_is_bounded_and_so_is_what_waits(pool: PagePool, monkeypatch) -> None:
    store = Store()
    async with telling(store, pool, monkeypatch) as known:
        for session in "st":
            known.used(KEYS, session)
        await until(lambda: sum(len(keys) for heard in store.heard for keys in heard.values()) == 2 * len(KEYS))
        for session in "st":
            assert [key for heard in store.heard for key in heard.get(session, [])] == KEYS, "each once, in order"
        monkeypatch.setattr(stored, "_MOST_WAITING", 10)
        store.heard.clear()
        known.used(KEYS[:8], "s")
        known.used(KEYS[:8], "t")
        await until(lambda: store.heard)
        assert store.heard == [{"s": KEYS[:8]}]


async def test_a_store_that_is_away_costs_the_uses_of_that_time(pool: PagePool, monkeypatch) -> None:
    store = Store(away=True)
    async with telling(store, pool, monkeypatch) as known:
        known.used(KEYS[:3], "s")
        await until(lambda: not store.away)
        known.used(KEYS[3:4], "s")
        await until(lambda: store.heard)
        assert store.heard == [{"s": KEYS[3:4]}]


def test_a_block_is_remembered_while_a_page_has_its_far_part() -> None:
    pool, key = PagePool(4), KEYS[1]
    known = StoredKeys(Store(), pool, WorkerMetrics())  # type: ignore[arg-type]
    whole, far = pool.allocate("a", 2)
    pool.note_parts([far], [True])
    pool.name(far, far_key(key), b"", 0)
    known.learn([key])
    pool.name(whole, key, b"", 0)
    pool.forget([whole])
    assert known.leading([key]) == 1
    pool.forget([far])
    assert known.leading([key]) == 0
