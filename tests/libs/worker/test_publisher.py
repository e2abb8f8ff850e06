"""The queue of pages that wait for the store."""

from __future__ import annotations

import asyncio
import itertools
from contextvars import copy_context
from dataclasses import dataclass, field

from penstock.engine.pages import PagePool
from penstock.kv.client.client import NOBODY, BlockPut, Origin, StoreFault
from penstock.runtime.metrics import WorkerMetrics
from penstock.worker.publishing import Soundness, open_publisher
from penstock.worker.stored import StoredKeys


@dataclass
class Page:
    """A page of one byte."""

    content: bytes = b"x"
    sound: bool = False
    released: bool = False
    page: int = field(default_factory=itertools.count(1).__next__)

    def view(self) -> memoryview:
        return memoryview(self.content)

    def release(self) -> None:
        self.released = True


@dataclass
class Store:
    """Takes everything, after the errors that it was given; holds what it takes while `gate` is closed."""

    connected: bool = True
    attachment: str = "one"
    errors: list[Exception] = field(default_factory=list)
    taken: list[BlockPut] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[bytes] = field(default_factory=list)
    """The bytes of each call that was answered."""

    async def put(self, blocks: list[BlockPut], origin: Origin) -> int:
        self.asked.set()
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.taken += blocks
        self.calls.append(b"".join(bytes(block.data) for block in blocks))
        return len(blocks)


def publishing(store: Store, pages: int, metrics: WorkerMetrics | None = None):
    metrics = metrics or WorkerMetrics()
    return open_publisher(store, metrics, pages, known=StoredKeys(store, PagePool(1), metrics), finite=finite)


def finite(block: memoryview) -> bool:
    return bytes(block) != b"!"


def publish(publisher, done) -> Page:
    [page] = publish_all(publisher, done, b"x")
    return page


def publish_all(
    publisher, done, *contents: bytes, soundness: Soundness | None = None, origin: Origin = NOBODY
) -> list[Page]:
    pages = [Page(content) for content in contents]
    blocks = [BlockPut(key=b"k", parent=b"p", first_token=0, data=page.view(), seconds=0.0) for page in pages]
    publisher.publish(blocks, origin, pages, done, copy_context(), soundness=soundness or Soundness())
    return pages


async def stored(publisher) -> tuple[int, Page]:
    told = asyncio.get_running_loop().create_future()
    page = publish(publisher, told.set_result)
    async with asyncio.timeout(10):
        return await told, page


async def test_a_defect_costs_the_blocks_that_were_being_stored_and_no_others() -> None:
    metrics = WorkerMetrics()
    store = Store(errors=[ZeroDivisionError(), StoreFault("away")])
    store.gate.set()
    async with publishing(store, 8, metrics) as publisher:
        for expected in (0, 0, 1, 1):
            count, page = await stored(publisher)
            assert (count, page.released) == (expected, True)
    assert len(store.taken) == 2
    text = metrics.text().decode()
    assert 'penstock_task_failures_total{task="publish"} 1.0' in text
    assert 'penstock_store_faults_total{what="publish"} 1.0' in text


async def test_the_end_and_a_full_queue_release_every_page() -> None:
    store, told = Store(), []
    async with publishing(store, 2) as publisher:
        pages = [publish(publisher, told.append) for _ in range(3)]
        assert (pages[2].released, told) == (True, [0]), "the third did not fit"
        await asyncio.sleep(0)
    assert all(page.released for page in pages) and not store.taken


async def test_of_more_pages_than_there_is_room_for_the_first_are_stored() -> None:
    store, told = Store(), []
    store.gate.set()
    async with publishing(store, 2) as publisher:
        pages = publish_all(publisher, told.append, b"a", b"b", b"c", b"d")
        assert [page.released for page in pages] == [False, False, True, True]
        while not told:
            await asyncio.sleep(0)
    assert told == [2] and [bytes(block.data) for block in store.taken] == [b"a", b"b"]


async def test_a_page_that_several_publish_takes_room_once() -> None:
    store, told = Store(), []
    async with publishing(store, 2) as publisher:
        for _ in range(3):
            page = Page(b"!", sound=True, page=7)
            block = BlockPut(key=b"k", parent=b"p", first_token=0, data=page.view(), seconds=0.0)
            publisher.publish([block], NOBODY, [page], told.append, copy_context(), soundness=Soundness())
        publish(publisher, told.append)
        assert told == [], "there is room for two pages"
        publish(publisher, told.append)
        assert told == [0]
        store.gate.set()
        while len(told) < 5:
            await asyncio.sleep(0)
    assert [bytes(block.data) for block in store.taken[:3]] == [b"!"] * 3, "sound pages are not looked at again"


async def test_what_waits_for_the_store_goes_there_together() -> None:
    """One call for all of an origin: what a worker has computed is in the store when it dies. More than is stored at a
    time waits for the next one."""
    store, told, others = Store(), [], Origin(session="other")
    async with publishing(store, 1000) as publisher:
        pages = publish_all(publisher, told.append, b"a")
        await store.asked.wait()
        for content in (b"b", b"c", b"d"):
            pages += publish_all(publisher, told.append, content)
            pages += publish_all(publisher, told.append, content.upper(), origin=others)
        pages += publish_all(publisher, told.append, *[b"x"] * 255)
        store.gate.set()
        while len(told) < 8:
            await asyncio.sleep(0)
    assert store.calls == [b"a", b"bcd", b"BCD", b"x" * 255] and told == [1] * 7 + [255]
    assert all(page.released for page in pages)


async def test_a_call_that_fails_costs_no_blocks_of_another_origin() -> None:
    store, metrics, told = Store(errors=[StoreFault("one"), StoreFault("two")]), WorkerMetrics(), []
    async with publishing(store, 8, metrics) as publisher:
        publish_all(publisher, told.append, b"a")
        await store.asked.wait()
        publish_all(publisher, told.append, b"b", b"c")
        publish_all(publisher, told.append, b"d", b"e", origin=Origin(session="other"))
        store.gate.set()
        while len(told) < 3:
            await asyncio.sleep(0)
    assert sorted(told) == [0, 0, 2] and store.calls == [b"de"]
    assert 'penstock_store_faults_total{what="publish"} 2.0' in metrics.text().decode()


async def test_blocks_of_a_request_from_the_first_that_is_not_finite_on_stay_here() -> None:
    store, metrics, told, request = Store(), WorkerMetrics(), [], Soundness()
    store.gate.set()
    async with publishing(store, 8, metrics) as publisher:
        pages = publish_all(publisher, told.append, b"a", b"b", b"!", b"c", soundness=request)
        pages += publish_all(publisher, told.append, b"d", soundness=request)
        pages += publish_all(publisher, told.append, b"!")
        count, last = await stored(publisher)
    assert told == [2, 0, 0] and count == 1
    assert [bytes(block.data) for block in store.taken] == [b"a", b"b", b"x"]
    assert all(page.released for page in (*pages, last))
    assert 'penstock_store_faults_total{what="not_finite"} 2.0' in metrics.text().decode()


async def test_blocks_of_a_request_that_has_failed_stay_here() -> None:
    store, told, request = Store(), [], Soundness()
    async with publishing(store, 8) as publisher:
        pages = publish_all(publisher, told.append, b"a")
        pages += publish_all(publisher, told.append, b"b", soundness=request)
        request.sound = False
        store.gate.set()
        count, _ = await stored(publisher)
    assert told == [1, 0] and count == 1
    assert [bytes(block.data) for block in store.taken] == [b"a", b"x"]
    assert all(page.released for page in pages)
