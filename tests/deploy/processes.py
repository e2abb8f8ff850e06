"""Command lines of pods and units, run as processes of this host, each at an address of the loopback network."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx2

_START_S = 90


def free_net() -> str:
    """The first three numbers of addresses that hardly anybody else uses: tests may run beside tests."""
    return f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"


@dataclass
class Processes:
    """Those that a test has started."""

    running: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def start(
        self, module: str, arguments: Iterable[str], given: Mapping[str, str], environment: Mapping[str, str]
    ) -> None:
        """Runs `python -m MODULE ARGUMENTS`, with what is `given` in place of what is written."""
        meant = []
        for argument in arguments:
            for written, value in given.items():
                argument = argument.replace(written, value)
            meant.append(argument)
        command = [sys.executable, "-m", module, *meant, "--log-level=warning"]
        self.running.append(await asyncio.create_subprocess_exec(*command, env=environment))

    async def until_ready(self, url: str) -> None:
        """Returns when the gateway there takes requests."""
        async with httpx2.AsyncClient() as client, asyncio.timeout(_START_S):
            while True:
                assert all(process.returncode is None for process in self.running)
                try:
                    if (await client.get(f"{url}/readyz")).status_code == 200:
                        return
                except httpx2.TransportError:
                    pass
                await asyncio.sleep(0.1)

    async def end(self) -> None:
        """SIGTERM ends all of them, in order."""
        for process in self.running:
            process.terminate()
        async with asyncio.timeout(30):
            assert {await process.wait() for process in self.running} == {0}


@asynccontextmanager
async def processes() -> AsyncIterator[Processes]:
    """None is left at the end of the block."""
    started = Processes()
    try:
        yield started
    finally:
        for process in started.running:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def ask(url: str, headers: Mapping[str, str]) -> httpx2.Response:
    """One request of a client, of several blocks."""
    said = "Which members of this mesh have answered, and from which tier did the blocks of the prompt come? " * 3
    body = {"model": "penstock-mini", "messages": [{"role": "user", "content": said}], "max_tokens": 4}
    async with httpx2.AsyncClient(timeout=60) as client:
        return await client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
