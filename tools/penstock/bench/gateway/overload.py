"""Three times as many requests as can be served, whether or not earlier ones are answered (open loop)."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass

from penstock.bench.gateway.client import Client
from penstock.bench.kv.processes import private_bytes

LIVE = 32
"""Requests that the gateway takes at one time."""
_TOKENS = 20
_PAUSE_US = 20_000
_FACTOR = 3


@dataclass(frozen=True, slots=True)
class Flood:
    """What came of it."""

    goodput: float
    """Answers per second, of what was served without overload."""
    refusal_p99_s: float
    held_bytes: int
    """The gateway's memory at its end."""


async def capacity(client: Client, seconds: float) -> float:
    """Answers per second when exactly as many clients ask as are served."""
    request = client.request(_TOKENS, seed=_PAUSE_US)
    until, answers = time.monotonic() + seconds, 0

    async def ask_on() -> None:
        nonlocal answers
        while time.monotonic() < until:
            done = await client.ask(request)
            answers += done.status == 200 and time.monotonic() <= until

    async with asyncio.TaskGroup() as tasks:
        for _ in range(LIVE):
            tasks.create_task(ask_on())
    return answers / _working(seconds)


def _working(seconds: float) -> float:
    """Of so many seconds those in which answers may end: the first ones cannot come before they are generated."""
    return seconds - _TOKENS * _PAUSE_US / 1e6


async def flood(client: Client, pid: int, seconds: float) -> Flood:
    """Overload for so long, after its capacity was measured for as long."""
    served = await capacity(client, seconds)
    request = client.request(_TOKENS, seed=_PAUSE_US)
    refusals: list[float] = []
    answers = 0
    begun = time.monotonic()

    async def ask_once() -> None:
        nonlocal answers
        done = await client.ask(request)
        if done.status == 200:
            answers += time.monotonic() - begun <= seconds
        else:
            refusals.append(done.begun - done.asked)

    async with asyncio.TaskGroup() as tasks:
        number = 0
        while time.monotonic() - begun < seconds:
            number += 1
            tasks.create_task(ask_once())
            await asyncio.sleep(max(0.0, begun + number / (_FACTOR * served) - time.monotonic()))
    return Flood(answers / _working(seconds) / served, statistics.quantiles(refusals, n=100)[98], private_bytes(pid))
