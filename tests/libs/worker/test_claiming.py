"""What a request says of the blocks that it computes, and how long it lets others compute them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import Context
from typing import Any

import pytest

from penstock.kv.client.claiming import Claimed, ClaimWait
from penstock.kv.client.client import StoreFault
from penstock.kv.identity import Chain
from penstock.kv.pace import Pace
from penstock.runtime.metrics import WorkerMetrics
from penstock.worker.claiming import PromptClaim
from penstock.worker.fetching import StoredPrefix
from penstock.worker.publishing import BlockSink

KEYS = [bytes([number] * 32) for number in range(10)]


class ClaimStore:
    """Answers every claim alike, and keeps what it is told."""

    def __init__(self, answer: Claimed | StoreFault) -> None:
        self.connected = True
        self.answer = answer
        self.claims: list[tuple[int, list[bytes], Pace]] = []
        self.withdrawn: list[int] = []

    def next_claim(self) -> int:
        return 10 + len(self.claims)

    async def claim(self, number: int, keys: Sequence[bytes], pace: Pace, sources: Sequence[str]) -> Claimed:
        self.claims.append((number, list(keys), pace))
        if isinstance(self.answer, StoreFault):
            raise self.answer
        return self.answer

    def withdraw(self, number: int) -> None:
        self.withdrawn.append(number)


def claim_of(
    store: Any, metrics: WorkerMetrics | None = None, block_s: float = 1.0, least_s: float = 5.0
) -> PromptClaim:
    def pace(first_block: int) -> Pace:
        return Pace(queue_s=100.0, block_s=block_s + first_block)

    return PromptClaim(store, metrics or WorkerMetrics(), pace, least_s=least_s)


@pytest.mark.parametrize(
    ("keys", "connected", "block_s", "claimed"),
    [(5, True, 1.0, True), (4, True, 1.0, False), (0, True, 1.0, False), (9, False, 1.0, False)],
)
async def test_only_what_takes_long_enough_is_claimed(
    keys: int, connected: bool, block_s: float, claimed: bool
) -> None:
    """Computing alone counts: the queue is nothing that others could spare."""
    store = ClaimStore(Claimed(2, "none"))
    store.connected = connected
    claim = claim_of(store, block_s=block_s)
    assert await claim.make(KEYS[:keys], 0) == (2 if claimed else 0)
    assert [one[1] for one in store.claims] == ([KEYS[:5]] if claimed else [])
    claim.withdraw()
    claim.withdraw()
    assert store.withdrawn == ([10] if claimed else []), "once, and only what was claimed"


@pytest.mark.parametrize("wait", ["stored", "left", "late", "none"])
async def test_waits_are_counted_by_their_end(wait: ClaimWait) -> None:
    metrics = WorkerMetrics()
    assert await claim_of(ClaimStore(Claimed(3, wait)), metrics).make(KEYS, 0) == 3
    for end in ("stored", "left", "late"):
        counted = metrics.registry.get_sample_value("penstock_claim_waits_total", {"end": end}) or 0
        assert counted == (end == wait)
    assert metrics.registry.get_sample_value("penstock_blocks_awaited_total") == (0 if wait == "none" else 3)


async def test_a_store_that_fails_costs_the_claim_and_nothing_else() -> None:
    store, metrics = ClaimStore(StoreFault("away")), WorkerMetrics()
    claim = claim_of(store, metrics)
    assert await claim.make(KEYS, 0) == 0
    assert 'penstock_store_faults_total{what="claim"} 1.0' in metrics.text().decode()
    claim.withdraw()
    assert store.withdrawn == [10], "it may have heard of it all the same"


async def test_a_second_claim_takes_the_place_of_the_first() -> None:
    store = ClaimStore(Claimed(0, "none"))
    claim = claim_of(store)
    await claim.make(KEYS, 0)
    await claim.make(KEYS[4:], 4)
    assert [one[0] for one in store.claims] == [10, 10]
    assert store.claims[1][2].block_s == 5.0, "a later block has its own cost"


class Giving:
    """A fetcher of a store that has so many blocks at each call."""

    def __init__(self, *stored: int) -> None:
        self.stored_then = list(stored)
        self.keys, self.block_size = KEYS, 16
        self.blocks = self.stored = 0
        self.asked: list[int] = []
        self.lacking = 0
        """Blocks that have no near part, which the next `conclude` gives up."""

    async def upto(self, count: int, pages: Any, *, compares: bool = False) -> bool:
        self.asked.append(count)
        self.blocks = self.stored = min(count, self.stored_then.pop(0))
        return self.blocks == count

    async def conclude(self, pages: Any, *, compares: bool = False) -> None:
        self.blocks, self.lacking = self.blocks - self.lacking, 0
        self.stored = self.blocks

    async def tell_uses(self) -> None: ...


async def test_what_others_computed_is_loaded_and_only_that() -> None:
    """Two blocks are stored, four come during the wait; of the nine that the sequence can use three are left."""
    store, fetcher = ClaimStore(Claimed(4, "stored")), Giving(2, 10)
    source: Any = fetcher
    result = await StoredPrefix(source, 9, lambda _: None, claim_of(store)).load(None)  # type: ignore[arg-type]
    assert [one[1] for one in store.claims] == [KEYS[2:9]]
    assert fetcher.asked == [9, 6]
    assert (result.valid_tokens, result.stored_blocks) == (6 * 16, 6)


async def test_blocks_that_are_given_up_are_claimed() -> None:
    """All were there, but of some the far part alone."""
    store, fetcher = ClaimStore(Claimed(0, "none")), Giving(9)
    fetcher.lacking = 6
    source: Any = fetcher
    result = await StoredPrefix(source, 9, lambda _: None, claim_of(store)).load(None)  # type: ignore[arg-type]
    assert [one[1] for one in store.claims] == [KEYS[3:9]]
    assert (result.valid_tokens, result.stored_blocks) == (3 * 16, 3)


async def test_a_prefix_that_is_stored_is_not_claimed() -> None:
    store, source = ClaimStore(Claimed(0, "none")), Giving(9)
    prefix: Any = source
    result = await StoredPrefix(prefix, 9, lambda _: None, claim_of(store)).load(None)  # type: ignore[arg-type]
    assert not store.claims and result.waited_s == 0.0


async def test_the_time_of_a_wait_is_told_apart() -> None:
    """Asking the store again takes as long as the rest of the load."""

    class Slow(ClaimStore):
        async def claim(self, number: int, keys: Sequence[bytes], pace: Pace, sources: Sequence[str]) -> Claimed:
            loop = asyncio.get_running_loop()
            come = loop.create_future()
            loop.call_later(0.05, come.set_result, None)
            await come
            return await super().claim(number, keys, pace, sources)

    source: Any = Giving(0)
    prefix = StoredPrefix(source, 9, lambda _: None, claim_of(Slow(Claimed(0, "late"))))
    assert (await prefix.load(None)).waited_s >= 0.04  # type: ignore[arg-type]


class Lent:
    """A page."""

    page, sound = 1, True

    def view(self) -> memoryview:
        return memoryview(b"x")

    def release(self) -> None: ...


class PartPublisher:
    """Stores so many blocks of each call."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.known: Any = self

    def leading(self, keys: Sequence[bytes]) -> int:
        return 0

    def publish(self, blocks: list[Any], origin: Any, pages: Any, done: Any, context: Context, **other: Any) -> None:
        done(min(self.blocks, len(blocks)))


@pytest.mark.parametrize(("stored", "gave_up"), [(3, 0), (2, 1), (0, 1)])
async def test_blocks_that_are_not_stored_end_the_claim(stored: int, gave_up: int) -> None:
    told: list[None] = []
    publisher: Any = PartPublisher(stored)
    sink = BlockSink(publisher, Chain(b"r" * 32, 4, range(12)), gave_up=lambda: told.append(None))
    sink.filled(0, [Lent()] * 3, list(range(12)))
    assert len(told) == gave_up
    sink.set_back()
    assert len(told) == gave_up + 1, "nor is one waited for that lost its pages"
