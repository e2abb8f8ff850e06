"""The timer for silences: it beats in each, says so until something is heard, and may be made quicker."""

from __future__ import annotations

import asyncio

from penstock.gateway.door.heartbeat import heartbeat


async def test_a_beat_is_due_until_something_is_heard() -> None:
    beats = asyncio.Queue[None]()
    with heartbeat(0.02, lambda: beats.put_nowait(None)) as silence:
        assert not silence.due
        await beats.get()
        assert silence.due, "whatever else came meanwhile"
        silence.heard()
        assert not silence.due
        await beats.get()
        assert silence.due


async def test_a_slow_one_is_made_quicker_at_once() -> None:
    beats = asyncio.Queue[float]()
    clock = asyncio.get_running_loop().time
    begin = clock()
    with heartbeat(3600.0, lambda: beats.put_nowait(clock())) as silence:
        silence.every(0.02)
        async with asyncio.timeout(10):
            first, second = [await beats.get() for _ in range(2)]
    assert first - begin >= 0.019 and second - first >= 0.01
