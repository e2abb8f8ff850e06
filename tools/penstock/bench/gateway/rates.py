"""Streamed events per second of one core, and how long a token is on its way through the gateway."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.gateway.client import Client
from penstock.testing.emitter import age

_UNTIL = 0.75
"""Part of the events up to which is measured: later some streams have ended, and ends cost more than events."""
_PROBES = 8
"""Of this many streams one says when its tokens were sent."""


@dataclass(frozen=True, slots=True)
class Streamer:
    """A process that streams."""

    client: Client
    pid: int

    def cpu_s(self) -> float:
        """Seconds of a processor that it has used."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class EventRate:
    """Events per second."""

    core: float
    """Of the streaming process's own time on a processor."""
    clock: float
    """Of time: what this machine streams, with the mesh and the client beside."""


class _Meter:
    """Counts the events of all streams; takes the clock between the first of each stream and most of them."""

    def __init__(self, subject: Streamer, streams: int, tokens: int) -> None:
        self._subject = subject
        self._events = 0
        self._first, self._last = streams, int(streams * tokens * _UNTIL)
        self._begun: tuple[float, float, int] | None = None
        self.rate: EventRate | None = None

    def count(self, events: int) -> None:
        """Takes note of some more."""
        self._events += events
        if self._begun is None and self._events >= self._first:
            self._begun = (self._subject.cpu_s(), time.monotonic(), self._events)
        elif self._begun is not None and self.rate is None and self._events >= self._last:
            self.stop()

    def stop(self) -> None:
        """Ends the measurement."""
        if self._begun is not None and self.rate is None:
            cpu_s, clock, events = self._begun
            gained = self._events - events
            self.rate = EventRate(gained / (self._subject.cpu_s() - cpu_s), gained / (time.monotonic() - clock))


async def events_per_s(subject: Streamer, streams: int, tokens: int) -> EventRate:
    """Events that `subject` streams per second, over concurrent streams of `tokens` tokens, emitted as
    fast as they are taken once all streams stand."""
    meter = _Meter(subject, streams, tokens)
    request = subject.client.request(tokens, seed=0, top_k=streams)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(subject.client.ask(request, meter.count))
    meter.stop()  # tokens that were merged make fewer events
    if meter.rate is None:
        raise RuntimeError(f"of {streams} streams not all were served")
    return meter.rate


async def on_the_way(client: Client, streams: int, events_per_s: float, seconds: float) -> float:
    """Seconds that 99 % of tokens take at most from the worker to the client, at so many events/s over all streams."""
    pause_us = round(1e6 * streams / events_per_s)
    tokens = max(20, round(seconds * 1e6 / pause_us))
    ages: list[float] = []
    started = time.monotonic() + 0.5

    def stamped(stamp: float, now: float) -> None:
        if now > started:  # the streams' beginnings are a burst
            ages.append(age(stamp, now))

    async with asyncio.TaskGroup() as tasks:
        for number in range(streams):
            probe = {"logprobs": True} if number % _PROBES == 0 else {}
            request = client.request(tokens, seed=pause_us, **probe)
            tasks.create_task(client.ask(request, stamped=stamped))
            await asyncio.sleep(pause_us / 1e6 / streams)  # so that tokens are spread over the pause
    return statistics.quantiles(ages, n=100)[98]
