"""The health check of containers says what gRPC health says, by its status."""

from __future__ import annotations

import asyncio
import sys

import pytest
from tests.libs.rpc.toy import NAME, Toy, served

from penstock.rpc.server import LIVE


async def probe(*arguments: str) -> tuple[int | None, str]:
    command = (sys.executable, "-m", "penstock.rpc.probe", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, error = await process.communicate()
    return process.returncode, error.decode()


@pytest.mark.parametrize("name", ["", NAME, LIVE])
async def test_it_follows_the_service(name: str) -> None:
    async with served(Toy()) as client:
        address = f"127.0.0.1:{client.server.port}"
        assert await probe(address, *([name] if name else [])) == (0, "")
        await client.server.set_serving(False)
        await client.server.set_live(False)
        status, error = await probe(address, *([name] if name else []))
        assert (status, error) == (1, f"{address}: NOT_SERVING\n")


async def test_nobody_there_and_nobody_meant() -> None:
    status, error = await probe("127.0.0.1:1")
    assert status == 1 and "127.0.0.1:1: UNAVAILABLE" in error
    status, error = await probe()
    assert status == 2 and error.startswith("usage: ")
