"""What a child says of itself, over a real socket."""

from __future__ import annotations

import asyncio

import pytest

from penstock.cli import liveness
from penstock.cli.liveness import Pulse
from penstock.rpc.server import serve


async def test_patience_with_a_stuck_child_begins_anew_when_it_works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse, pulses, bound_s = liveness._pulse, list[tuple[float, Pulse]](), 0.6
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(30), serve("127.0.0.1:0", lambda server: None, []) as server:
        await server.set_live(False)

        async def noted(channel: object, timeout_s: float) -> Pulse:
            at, found = loop.time(), await pulse(channel, timeout_s)  # type: ignore[arg-type]
            pulses.append((at, found))
            if len(pulses) <= 2:  # it works again when it is asked for the second time, and not after that
                await server.set_live(len(pulses) == 1)
            return found

        monkeypatch.setattr(liveness, "_pulse", noted)
        await liveness.stuck(f"127.0.0.1:{server.port}", bound_s)
    found = [each for _, each in pulses]
    assert found == [Pulse.STUCK, Pulse.WELL, *[Pulse.STUCK] * (len(found) - 2)]
    assert pulses[-1][0] - pulses[2][0] >= bound_s - 0.01


async def test_an_address_where_nobody_answers_has_no_pulse_and_is_not_stuck() -> None:
    async with serve("127.0.0.1:0", lambda server: None, []) as server:
        address = f"127.0.0.1:{server.port}"
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(liveness.stuck(address, 0.1))
        await liveness.silence(address, 0.6)
        assert not watching.done()
        watching.cancel()
