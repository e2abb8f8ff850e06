"""Opening the Redis that a setting names: what is wrong is said with the setting, and never with the password."""

from __future__ import annotations

import asyncio
import sys

import pytest

from penstock.gateway.accounts.books import open_book
from penstock.gateway.api.responses.in_redis import open_redis_responses
from penstock.gateway.api.responses.store import StoreBounds
from penstock.runtime.config import ConfigError
from penstock.runtime.redis_client import asked, open_redis, without_password

BOUNDS = StoreBounds(tenant_count=1, tenant_bytes=1, count=1, bytes=1, ttl_s=1)


def opener(setting: str, url: str):
    return open_book(url) if setting == "ledger" else open_redis_responses(url, BOUNDS)


@pytest.mark.parametrize("setting", ["ledger", "responses_store"])
async def test_an_address_that_is_none_is_named_without_its_password(setting):
    """A slash in a password makes the rest of it a port, as URLs are read."""
    with pytest.raises(ConfigError, match="must be redis://HOST:PORT/DATABASE") as caught:
        async with opener(setting, "redis://me:hush/hush@127.0.0.1:6379/0"):
            pass
    assert f"{setting} = 'redis://***@127.0.0.1:6379/0'" in str(caught.value) and "hush" not in str(caught.value)


@pytest.mark.parametrize("setting", ["ledger", "responses_store"])
async def test_a_missing_package_is_named_with_the_command_that_installs_it(setting, monkeypatch):
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)  # importing it is an ImportError
    with pytest.raises(ConfigError, match=rf"{setting} = .*penstock\[redis\]"):
        async with opener(setting, "redis://127.0.0.1:1/0"):
            pass


async def test_a_ledger_that_refuses_is_named_without_its_password():
    async def refusing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(b"-WRONGPASS invalid username-password pair or user is disabled.\r\n")
        writer.close()

    server = await asyncio.start_server(refusing, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError, match=r"ledger = .*refuses: .*invalid username-password") as caught:
            async with open_book(f"redis://me:hush@127.0.0.1:{port}/0"):
                pass
    assert "hush" not in str(caught.value)


async def test_a_redis_that_takes_a_connection_and_never_answers_is_given_up():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server, open_redis("ledger", f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0") as client:
        async with asyncio.timeout(20):
            with pytest.raises(OSError, match=r"[Tt]imeout"):
                await asked(client.ping())


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("rediss://me:hush@host/1", "rediss://***@host/1"),
        ("redis://:hu@sh@host:1/0", "redis://***@host:1/0"),
        ("unix:///run/redis.sock?password=hush", "unix:///run/redis.sock"),
        ("unix:///run/redis.sock?password=hu@sh", "unix://***"),
        ("redis://me:hu?sh@host/0", "redis://***"),
    ],
)
def test_what_is_shown_of_an_address(url, shown):
    assert without_password(url) == shown
