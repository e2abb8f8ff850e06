"""Every background task of a store and of its client fails once, by a defect: the store serves on, and counts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs
from tests.services.kvstore.helpers import HOST, client_of, eventually, keys, puts, settings, spec

from penstock.kv.client.client import StoreClient, open_store
from penstock.kv.client.link import Link
from penstock.kv.client.loans import Loans
from penstock.kvstore.elsewhere.neighbours import Neighbours
from penstock.kvstore.events.membership import StoreMembership
from penstock.kvstore.events.wire.publisher import Publisher
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.kvstore.tiers import host as host_module
from penstock.kvstore.tiers.device.mover import DeviceMover
from penstock.kvstore.tiers.disk.mover import DiskMover
from penstock.kvstore.tiers.disk.opening import Disk
from penstock.router.config import RouterConfig
from penstock.router.service import open_router
from penstock.testing.twin import TwinDevice


def failing_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Has a job raise when it is first started; returns a list that grows with each start."""
    whole: Callable[..., Awaitable[None]] = getattr(owner, name)
    starts: list[int] = []

    async def job(*given: Any, **named: Any) -> None:
        starts.append(len(starts))
        if len(starts) == 1:
            raise ZeroDivisionError("a defect")
        await whole(*given, **named)

    monkeypatch.setattr(owner, name, job)
    return starts


@asynccontextmanager
async def two_stores(path: Path) -> AsyncIterator[tuple[KvStore, KvStore]]:
    """One with everything that a store may have, and one that knows it."""
    async with AsyncExitStack() as stack:
        config = settings(
            16,
            nvme_dir=path,
            nvme_bytes=2 << 20,
            gpu_bytes=16 * 4096,
            router="127.0.0.1:9",
            peers=("127.0.0.1:9",),
            events_address="tcp://127.0.0.1:0",
            events_replay_address="tcp://127.0.0.1:0",
        )
        store = await stack.enter_async_context(open_kvstore(config, TwinDevice))
        other = await stack.enter_async_context(open_kvstore(settings(16, peers=(store.address,))))
        yield store, other


@pytest.mark.parametrize(
    ("task", "owner", "job"),
    [
        ("kvstore pages", host_module, "provide_pages"),
        ("disk", Disk, "run"),
        ("disk mover", DiskMover, "run"),
        ("device mover", DeviceMover, "run"),
        ("announcing", Neighbours, "announce"),
        ("rehoming", Neighbours, "_rehome"),
        ("membership", StoreMembership, "run"),
        ("block events", Publisher, "follow"),
        ("event replay", Publisher, "answer"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)
async def test_a_task_of_the_store_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, owner: Any, job: str
) -> None:
    starts = failing_once(monkeypatch, owner, job)
    with capture_logs() as logs:
        async with two_stores(tmp_path) as (store, _), client_of(store.address) as client:
            await eventually(lambda: len(starts) >= 2)
            assert await client.put(puts(4)) == 4
            assert await client.lookup(keys(4)) == 4
            counted = f'penstock_task_failures_total{{task="{task}"}} 1.0'.encode()
            await eventually(lambda: counted in store.metrics.text())
    assert [line["task"] for line in logs if line["event"] == "background task failed"][:1] == [task]


@pytest.mark.parametrize(("task", "owner", "job"), [("attach", Link, "stay_attached"), ("tidy", Loans, "tidy")])
async def test_a_task_of_the_client_fails(monkeypatch: pytest.MonkeyPatch, task: str, owner: Any, job: str) -> None:
    starts, failed = failing_once(monkeypatch, owner, job), list[str]()
    async with open_kvstore(settings()) as store, grpc.aio.insecure_channel(store.address) as channel:
        async with open_store(channel, "test", spec(), HOST, timeout_s=10, failed=failed.append) as client:
            await eventually(lambda: len(starts) == 2 and client.connected)
            assert await put_and_read(client) == 3
            await eventually(lambda: store.stats().leases == 0)
    assert failed == [task]


def writers() -> list[asyncio.Task[Any]]:
    """Tasks of gRPC that send what a stream's iterator gives."""
    return [task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task.get_coro())]


async def test_a_router_that_has_gone_leaves_no_task_behind() -> None:
    """Neither does an answer for its successor get lost in one."""
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(open_router(RouterConfig()))
        async with open_kvstore(settings(router=router.address)):
            await eventually(lambda: len(writers()) == 1 and len(list(router.planner.registry)) == 1)
            await stack.aclose()
            await eventually(lambda: not writers())


async def put_and_read(client: StoreClient) -> int:
    """How many blocks come back."""
    await client.put(puts(3))
    async with client.lease(keys(3)) as leased:
        return len(leased.blocks)
