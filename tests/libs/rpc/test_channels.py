"""Channels that are lent to peers which come and go."""

from __future__ import annotations

import grpc
import pytest
from tests.libs.rpc.toy import Toy, served

from penstock.rpc import channels as module
from penstock.rpc.channels import Channels, open_channels

GONE = "unix:/nowhere/{}"


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few idle channels are too many."""
    monkeypatch.setattr(module, "MOST_IDLE", 8)


async def visit(channels: Channels, number: int) -> None:
    async with channels.lent(GONE.format(number), "worker") as channel:
        assert isinstance(channel, grpc.aio.Channel)


async def test_many_peers_leave_few_channels() -> None:
    async with open_channels() as channels:
        for number in range(100):
            await visit(channels, number)
            assert len(channels) <= 8 + 1
        async with channels.lent(GONE.format(99), "worker") as last, channels.lent(GONE.format(99), "worker") as same:
            assert same is last
        channels.to(GONE.format("for good"), "router")
        await channels.forget(GONE.format(99))
        for number in range(100):
            await visit(channels, number)
        assert len(channels) <= 8 + 2
    assert len(channels) == 0


async def test_a_channel_with_a_call_stays_and_so_does_one_for_good() -> None:
    async with served(Toy()) as client, open_channels() as channels:
        address = f"127.0.0.1:{client.server.port}"
        kept = channels.to(GONE.format("for good"), "router")
        async with channels.lent(address, "worker") as channel:
            call = channel.stream_stream("/toy.Toy/Echo")()
            await call.write(b"before")
            assert await call.read() == b"before"
            for number in range(100):
                await visit(channels, number)
            await call.write(b"after")
            assert await call.read() == b"after"
            call.cancel()
        async with channels.lent(address, "worker") as same:
            assert same is channel, "it is still there for the next one"
        assert channels.to(GONE.format("for good"), "router") is kept


async def test_a_channel_that_was_idle_for_long_is_closed_with_the_next_loan() -> None:
    now = 0.0
    channels = Channels(clock=lambda: now)
    await visit(channels, 1)
    now += module.IDLE_S - 1
    await visit(channels, 2)
    assert len(channels) == 2
    now += 2
    await visit(channels, 3)
    assert len(channels) == 2, "the first was idle for too long"
    await channels.close()
