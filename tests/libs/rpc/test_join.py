"""A worker stays joined, whatever its router does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.errors import Refused
from penstock.rpc import join
from penstock.rpc.capability import PLAN_KEY_BYTES
from penstock.rpc.channels import open_channels
from penstock.rpc.join import stay_joined
from penstock.rpc.server import serve
from penstock.rpc.stay import Pauses, stay
from penstock.rpc.wish import WorkerWish
from penstock.v1 import common_pb2, router_pb2, router_pb2_grpc

HELLO = router_pb2.Hello(member_id="w", role=router_pb2.ROLE_BOTH, address="127.0.0.1:1")


class FakeRouter(router_pb2_grpc.RouterServicer):
    """Hands each stream's messages over, and ends streams on demand."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple[float, router_pb2.JoinRequest]] = asyncio.Queue()
        self.refuse = False
        self.says: asyncio.Queue[router_pb2.MemberCommand] = asyncio.Queue()
        self.end = asyncio.Event()
        self.left = asyncio.Event()

    async def Join(self, request_iterator: Any, context: Any) -> AsyncIterator[router_pb2.JoinResponse]:
        if self.refuse:
            raise Refused("block_size is 32 here and 16 there")
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            yield router_pb2.JoinResponse(welcome=router_pb2.Welcome(router_id="r"))
            while not self.end.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        yield router_pb2.JoinResponse(command=await self.says.get())
            self.end.clear()
        finally:
            reader.cancel()
            self.left.set()

    async def _read(self, requests: Any) -> None:
        async for request in requests:
            self.heard.put_nowait((time.monotonic(), request))

    async def next(self, kind: str) -> router_pb2.JoinRequest:
        """The next message, which has to be of that kind."""
        async with asyncio.timeout(10):
            _, request = await self.heard.get()
        assert request.WhichOneof("kind") == kind
        return request

    def Plan(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    def Watch(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


@asynccontextmanager
async def serving(router: FakeRouter, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    def register(server: Any) -> None:
        router_pb2_grpc.add_RouterServicer_to_server(router, server)

    async with serve(address, register, ["penstock.v1.Router"], grace=0) as server:
        yield f"127.0.0.1:{server.port}"


@asynccontextmanager
async def joined(address: str, **events: Any) -> AsyncIterator[list[int]]:
    """A member that counts how often its load was asked for."""
    asked = [0]

    def load() -> router_pb2.Load:
        asked[0] += 1
        return router_pb2.Load(running=asked[0])

    async with open_channels() as channels, asyncio.TaskGroup() as tasks:
        task = tasks.create_task(stay_joined(channels.to(address, "router"), HELLO, load, **events))
        yield asked
        task.cancel()


async def test_hello_then_load_then_load_when_changed() -> None:
    router, changed, is_joined = FakeRouter(), asyncio.Event(), asyncio.Event()
    async with serving(router) as address, joined(address, changed=changed, joined=is_joined):
        hello = (await router.next("hello")).hello
        assert len(hello.plan_key) == PLAN_KEY_BYTES
        hello.plan_key = b""
        assert hello == HELLO
        assert (await router.next("load")).load.running == 1
        assert is_joined.is_set()
        began = time.monotonic()
        changed.set()
        assert (await router.next("load")).load.running == 2
        assert time.monotonic() - began < 0.9, "the change was not waited for"
    async with asyncio.timeout(5):
        await router.left.wait()


async def test_the_key_of_plans_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "RENEW_S", 0.01)
    router = FakeRouter()
    async with serving(router) as address, joined(address):
        known = {(await router.next("hello")).hello.plan_key}
        async with asyncio.timeout(10):
            while len(known) < 4:
                _, request = await router.heard.get()
                if request.HasField("plan_key"):
                    known.add(request.plan_key)
    assert {len(key) for key in known} == {PLAN_KEY_BYTES}


async def test_many_changes_are_one_push() -> None:
    router, changed = FakeRouter(), asyncio.Event()
    async with serving(router) as address, joined(address, changed=changed):
        await router.next("hello")
        times = []
        for _ in range(6):
            async with asyncio.timeout(5):
                at, _ = await router.heard.get()
            times.append(at)
            changed.set()
        assert times[-1] - times[0] >= 5 * 0.045


async def test_load_comes_at_least_once_a_second() -> None:
    router = FakeRouter()
    async with serving(router) as address, joined(address):
        await router.next("hello")
        await router.next("load")
        began = time.monotonic()
        await router.next("load")
        assert 0.5 < time.monotonic() - began < 3


class Blocks:
    """Blocks of which there is one piece of news after the other; each stream begins with a snapshot."""

    def __init__(self) -> None:
        self.fresh = asyncio.Event()
        self.news: list[common_pb2.BlockEvents] = []

    @contextmanager
    def followed(self) -> Iterator[Blocks]:
        self.news = []
        self.add(snapshot=True, stored=[b"all"])
        yield self

    def add(self, **fields: Any) -> None:
        self.news.append(common_pb2.BlockEvents(**fields))
        self.fresh.set()

    async def wait(self) -> None:
        await self.fresh.wait()

    def take(self) -> common_pb2.BlockEvents | None:
        self.fresh.clear()
        return self.news.pop(0) if self.news else None


async def test_blocks_are_told_at_once_and_all_of_them_on_each_stream() -> None:
    router, blocks = FakeRouter(), Blocks()
    async with serving(router) as address, joined(address, blocks=blocks.followed):
        for _ in range(2):
            await router.next("hello")
            assert (await router.next("blocks")).blocks.snapshot
            await router.next("load")
            began = time.monotonic()
            for number in range(3):
                blocks.add(stored=[b"%d" % number])
            for number in range(3):
                assert list((await router.next("blocks")).blocks.stored) == [b"%d" % number]
            assert time.monotonic() - began < 0.9, "the change was not waited for"
            await router.next("load")
            router.end.set()


async def test_what_a_worker_wants_is_told_at_once_and_once() -> None:
    router, wish = FakeRouter(), WorkerWish(HELLO.role)
    async with serving(router) as address, joined(address, wish=wish):
        await router.next("hello")
        await router.next("load")
        began = time.monotonic()
        wish.drain()
        assert (await router.next("draining")).draining
        await router.next("load")
        wish.drain(False)
        assert not (await router.next("draining")).draining
        await router.next("load")
        wish.take(router_pb2.ROLE_PREFILL)
        assert (await router.next("role")).role == router_pb2.ROLE_PREFILL
        assert time.monotonic() - began < 0.9, "the changes were not waited for"
        await router.next("load")
        wish.take(router_pb2.ROLE_PREFILL)
        await router.next("load")


async def test_a_router_that_ends_the_stream_is_joined_again_and_told_again() -> None:
    router, wish = FakeRouter(), WorkerWish(HELLO.role)
    wish.drain()
    async with serving(router) as address, joined(address, wish=wish):
        assert (await router.next("hello")).hello.role == HELLO.role
        await router.next("draining")
        await router.next("load")
        wish.take(router_pb2.ROLE_DECODE)
        await router.next("role")
        router.end.set()
        async with asyncio.timeout(5):
            while (message := (await router.heard.get())[1]).WhichOneof("kind") == "load":
                pass
        assert message.hello.role == router_pb2.ROLE_DECODE
        await router.next("draining")
        await router.next("load")


async def test_commands_are_passed_on() -> None:
    router, obeyed = FakeRouter(), asyncio.Queue[router_pb2.MemberCommand]()
    async with serving(router) as address, joined(address, obey=obeyed.put_nowait):
        await router.next("hello")
        router.says.put_nowait(router_pb2.MemberCommand(drain=True))
        router.says.put_nowait(router_pb2.MemberCommand(role=router_pb2.ROLE_BOTH))
        async with asyncio.timeout(5):
            assert (await obeyed.get()).drain
            assert (await obeyed.get()).role == router_pb2.ROLE_BOTH


async def test_a_router_that_comes_back_is_joined_again() -> None:
    router, is_joined = FakeRouter(), asyncio.Event()
    async with serving(router) as address:
        pass  # now nobody listens there
    async with joined(address, joined=is_joined):
        for _ in range(2):
            async with serving(router, address):
                await router.next("hello")
                await router.next("load")
                assert is_joined.is_set()
            router.heard = asyncio.Queue()


async def test_a_refusal_is_logged_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.rpc.join.stay", partial(stay, pauses=Pauses(refused=0.01)))
    router = FakeRouter()
    router.refuse = True
    with capture_logs() as lines:
        async with serving(router) as address, joined(address):
            await eventually(lambda: lines)
            router.refuse = False
            await router.next("hello")
    assert lines[0]["event"] == "connection refused"
    assert lines[0]["log_level"] == "error"
    assert "block_size is 32 here and 16 there" in lines[0]["reason"]
    assert lines[0]["member"] == "w"


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_a_fault_of_the_worker_itself_leaves_as_it_is() -> None:
    """Not in a group: whoever runs the join compares types, and an operator reads the message."""
    fault = ZeroDivisionError("no load")

    def broken() -> router_pb2.Load:
        raise fault

    router, is_joined = FakeRouter(), asyncio.Event()
    async with serving(router) as address, open_channels() as channels:
        with pytest.raises(ZeroDivisionError) as caught:
            async with asyncio.timeout(5):
                await stay_joined(channels.to(address, "router"), HELLO, broken, joined=is_joined)
        assert caught.value is fault
        assert not is_joined.is_set()
        async with asyncio.timeout(5):
            await router.left.wait()
