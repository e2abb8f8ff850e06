"""Asking a Redis."""

from __future__ import annotations

import asyncio

import pytest

from penstock.runtime.redis_client import asked, open_redis
from penstock.testing.redis_server import redis_server


async def test_whoever_is_cancelled_while_it_asks_does_not_go_on(tmp_path):
    """Whenever that comes: redis-py's own `wait_for` takes a cancellation that comes with the end of what it waits
    for, in Python 3.11."""

    async def ask() -> None:
        for _ in range(50):
            await asked(client.get("key"))

    async with redis_server(tmp_path) as server, open_redis("state", server.url) as client:
        for turns in range(12):
            task = asyncio.ensure_future(ask())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_connections_go_when_a_crowd_has_gone(tmp_path):
    """And who asks alone then connects no more."""
    async with redis_server(tmp_path) as server, open_redis("state", server.url) as client:
        await asyncio.gather(*(asked(client.set(f"key {number}", "value")) for number in range(40)))
        assert len(await asked(client.client_list())) <= 5
        before = (await asked(client.info("stats")))["total_connections_received"]
        for _ in range(20):
            assert await asked(client.get("key 7")) == b"value"
        assert (await asked(client.info("stats")))["total_connections_received"] == before


async def test_a_crowd_is_not_refused(tmp_path):
    """redis-py's own bound is a hundred connections."""
    async with redis_server(tmp_path) as server, open_redis("state", server.url) as client:
        waiting = [asyncio.ensure_future(asked(client.blpop(["news"], timeout=1))) for _ in range(150)]
        assert await asyncio.gather(*waiting) == [None] * 150
