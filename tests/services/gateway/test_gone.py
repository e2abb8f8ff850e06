"""A client that leaves, over a real socket: before its reply that ends the work for it, afterwards it means nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.gateway.accounts.admission import ClientGone
from penstock.gateway.api.openai.shapes import STYLE
from penstock.gateway.door.http import _until_gone
from penstock.gateway.door.protocol import streamed_body
from penstock.gateway.door.reply import Reply
from penstock.gateway.door.server import serve_http
from penstock.runtime.addresses import HostPort

REQUEST = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n{}"

Work = Callable[[Reply, asyncio.Event], Awaitable[None]]


@dataclass
class Seen:
    """What became of the one request."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """The server has told the application that its client left."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    error: BaseException | None = None
    work: str = "running"


@asynccontextmanager
async def door(work: Work) -> AsyncIterator[tuple[Seen, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A server whose every request is `work`, and a client that has sent one."""
    seen = Seen()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        async def noting() -> Any:
            message = await receive()
            if message["type"] == "http.disconnect":
                seen.left.set()
            return message

        reply = Reply(send, streamed_body(scope), "req-1", STYLE)

        async def job() -> None:
            seen.begun.set()
            try:
                await work(reply, seen.left)
                seen.work = "ended"
            except asyncio.CancelledError:
                seen.work = "cancelled"
                raise

        try:
            await _until_gone(noting, reply, job())
        except ClientGone as error:
            seen.error = error
        finally:
            seen.over.set()

    address = HostPort("127.0.0.1:0")
    async with (
        asyncio.timeout(30),
        serve_http(application, address, failed=lambda name: None) as at,  # type: ignore[arg-type]
    ):
        reader, writer = await asyncio.open_connection(at.host, at.port)
        try:
            writer.write(REQUEST)
            await seen.begun.wait()
            yield seen, reader, writer
        finally:
            writer.close()


async def nothing_yet(reply: Reply, left: asyncio.Event) -> None:
    await asyncio.Event().wait()


async def half_a_stream(reply: Reply, left: asyncio.Event) -> None:
    await reply.write(STYLE.written([{"n": 1}]))
    await asyncio.Event().wait()


@pytest.mark.parametrize(("work", "first"), [(nothing_yet, b""), (half_a_stream, b'data: {"n":1}\n')])
async def test_a_client_that_leaves_before_its_reply_is_over_ends_the_work(work: Work, first: bytes) -> None:
    async with door(work) as (seen, reader, writer):
        while first and await reader.readline() != first:
            pass
        writer.close()
        await seen.over.wait()
    assert isinstance(seen.error, ClientGone)
    assert seen.work == "cancelled"


async def whole_then_more(reply: Reply, left: asyncio.Event) -> None:
    await reply.json({"n": 1})
    await left.wait()
    for _ in range(10):  # whoever would end this has its turns
        await asyncio.sleep(0)


async def stream_then_more(reply: Reply, left: asyncio.Event) -> None:
    await reply.write(STYLE.written([{"n": 1}]))
    await reply.end_events(b"", "")
    await left.wait()
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("work", "last"), [(whole_then_more, b'{"n":1}'), (stream_then_more, b"data: [DONE]\n\n")])
async def test_a_client_that_leaves_after_the_last_byte_ends_nothing(work: Work, last: bytes) -> None:
    async with door(work) as (seen, reader, writer):
        await reader.readuntil(last)
        writer.close()
        await seen.over.wait()
    assert seen.left.is_set()
    assert seen.error is None
    assert seen.work == "ended"
