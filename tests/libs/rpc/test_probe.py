"""The health check of containers says what gRPC health says, by its status."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from tests.libs.rpc.toy import NAME, Toy, served

from penstock.cli import authority
from penstock.rpc.identity import MemberIdentity
from penstock.rpc.server import LIVE, serve


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


async def test_a_service_that_asks_for_certificates_is_shown_its_own(tmp_path: Path) -> None:
    authority.init(directory=tmp_path / "ca")
    for role in ("worker", "store"):
        authority.issue(role, role, directory=tmp_path / "ca", out=tmp_path / role)
    async with serve("127.0.0.1:0", lambda server: None, [], member=MemberIdentity(tmp_path / "worker")) as server:
        await server.set_serving(True)
        address = f"127.0.0.1:{server.port}"
        assert await probe(address, "--member-tls", str(tmp_path / "worker")) == (0, "")
        assert await probe(address, LIVE, "--member-tls", str(tmp_path / "worker")) == (0, "")
        for strange in ((), ("--member-tls", str(tmp_path / "store"))):
            status, error = await probe(address, *strange)
            assert status == 1 and "UNAVAILABLE" in error
        status, error = await probe(address, "--member-tls", str(tmp_path))
        assert status == 2 and "member_tls = " in error
