"""A worker's wishes to keep blocks: what several promises come to, and a store that can't make any."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.client.client import StoreFault
from penstock.runtime.metrics import WorkerMetrics
from penstock.worker.order import Mark
from penstock.worker.retaining import Kept, Retainer, merge

GRANTS = st.lists(st.builds(Kept, st.sampled_from([1.0, 5.0, 60.0]), st.integers(1, 6)), max_size=4)
KEYS = [bytes([number]) * 32 for number in range(6)]


@given(GRANTS)
def test_each_block_is_kept_as_long_as_the_best_promise_that_covers_it(grants: list[Kept]) -> None:
    kept = merge(grants)
    best = [max((one.seconds for one in grants if one.blocks > at), default=0.0) for at in range(6)]
    assert kept.blocks == sum(seconds > 0 for seconds in best)
    assert kept.seconds == min(best[: kept.blocks], default=0.0)


@dataclass
class Store:
    """Promises up to `room` blocks, at most 30 s; away when `away`."""

    room: int = 4
    away: bool = False
    asked: list[tuple[int, float]] = field(default_factory=list)

    async def retain(self, keys: list[bytes], seconds: float, namespace: bytes) -> tuple[float, int]:
        if self.away:
            raise StoreFault("away")
        self.asked.append((len(keys), seconds))
        return min(seconds, 30.0), min(len(keys), self.room)


def retainer(store: Store, *marks: Mark) -> tuple[Retainer, WorkerMetrics]:
    metrics = WorkerMetrics()
    return Retainer(store, metrics, marks, b"n" * 16), metrics  # type: ignore[arg-type]


async def test_short_prefixes_are_asked_for_first_and_the_answer_again_with_the_prompt() -> None:
    store = Store()
    one, _ = retainer(store, Mark(5.0, None), Mark(60.0, 2))
    one.begin(KEYS[:3])
    assert await one.prompt() == Kept(5.0, 3)
    assert await one.answer(KEYS) == Kept(5.0, 4)
    assert store.asked == [(2, 60.0), (3, 5.0), (2, 60.0), (6, 5.0)]
    await one.close()


async def test_without_a_wish_nothing_is_asked() -> None:
    store = Store()
    one, _ = retainer(store)
    one.begin(KEYS)
    assert not one
    assert (await one.prompt(), await one.answer(KEYS), store.asked) == (Kept(), Kept(), [])


async def test_a_store_that_is_away_promises_nothing_and_is_counted() -> None:
    one, metrics = retainer(Store(away=True), Mark(5.0, None))
    one.begin(KEYS)
    assert await one.prompt() == Kept()
    assert 'penstock_store_faults_total{what="retain"} 1.0' in metrics.text().decode()
    await one.close()


async def test_a_defect_is_counted_and_promises_nothing() -> None:
    one, metrics = retainer(Store(room="many"), Mark(5.0, None))  # type: ignore[arg-type]
    one.begin(KEYS)
    assert await one.prompt() == Kept()
    assert 'penstock_task_failures_total{task="retain"} 1.0' in metrics.text().decode()
    await one.close()


async def test_closing_ends_what_is_under_way() -> None:
    class Slow(Store):
        async def retain(self, keys: list[bytes], seconds: float, namespace: bytes) -> tuple[float, int]:
            try:
                return await asyncio.get_running_loop().create_future()
            finally:
                self.asked.append((len(keys), seconds))

    store = Slow()
    one, _ = retainer(store, Mark(5.0, None))
    one.begin(KEYS)
    await asyncio.sleep(0)
    await one.close()
    assert store.asked == [(len(KEYS), 5.0)]
