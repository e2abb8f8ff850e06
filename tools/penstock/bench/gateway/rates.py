"""Streamed events per second of one core, and how long a token is on its way through the gateway."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.gateway.client import Client
from penstock.testing.emitter import age

_UNTIL = 0.75
"""Part of the events up to which is measured: later some streams have ended, and ends cost more than events."""
_BURST_S = 0.5
"""The streams' beginnings, which are not measured."""
_FEW = 10.0
"""Tokens per second of one stream that no gateway is busy with."""
_TRIALS = 3
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


class _Meter:
    """Counts the events of all streams; reads the processor's time at the first of each stream and at most of them."""

    def __init__(self, subject: Streamer, streams: int, tokens: int) -> None:
        self._subject = subject
        self._events = 0
        self._waiting, self._last = streams, int(streams * tokens * _UNTIL)
        self._begun: tuple[float, int] | None = None
        self.rate: float | None = None
        """Events per second of the streaming process's own time on a processor."""

    def stream(self) -> Callable[[int], None]:
        """What takes note of one stream's events."""
        begun = False

        def count(events: int) -> None:
            nonlocal begun
            self._events += events
            if not begun:
                begun = True
                self._begin()
            elif self._events >= self._last and self.rate is None:
                self.stop()

        return count

    def _begin(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._begun = (self._subject.cpu_s(), self._events)

    def stop(self) -> None:
        """Ends the measurement."""
        if self._begun is not None and self.rate is None:
            cpu_s, events = self._begun
            self.rate = (self._events - events) / (self._subject.cpu_s() - cpu_s)


async def events_per_s(subject: Streamer, streams: int, tokens: int) -> float:
    """Events that `subject` streams per second of its own time on a processor, over concurrent streams of `tokens`
    tokens, emitted as fast as they are taken once all streams stand."""
    meter = _Meter(subject, streams, tokens)
    request = subject.client.request(tokens, seed=0, top_k=streams)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(subject.client.ask(request, meter.stream()))
    meter.stop()  # tokens that were merged make fewer events
    if meter.rate is None:
        raise RuntimeError(f"of {streams} streams not all were served")
    return meter.rate


@dataclass(frozen=True, slots=True)
class Passage:
    """What passed through the gateway at one rate."""

    p99_s: float
    """Seconds that 99 % of tokens take at most from the worker to the client."""
    core: float
    """Of one core, the part that the gateway used."""


async def on_the_way(subject: Streamer, streams: int, events_per_s: float, seconds: float) -> Passage:
    """Tokens that come at so many events/s over all streams, as those of an engine do: in steps."""
    pause_us = round(1e6 * streams / events_per_s)
    tokens = max(20, round(seconds * 1e6 / pause_us))
    started = time.monotonic() + _BURST_S
    ages: list[float] = []

    def stamped(stamp: float, now: float) -> None:
        if now > started:
            ages.append(age(stamp, now))

    async with asyncio.TaskGroup() as tasks:
        core = tasks.create_task(_core(subject, seconds))
        for number in range(streams):
            probe = {"logprobs": True} if number % _PROBES == 0 else {}
            request = subject.client.request(tokens, seed=pause_us, **probe)
            tasks.create_task(subject.client.ask(request, stamped=stamped))
            await asyncio.sleep(pause_us / 1e6 / streams)  # so that tokens are spread over the pause
    return Passage(statistics.quantiles(ages, n=100)[98], core.result())


async def _core(subject: Streamer, seconds: float) -> float:
    """The part of one core that it uses, from the streams' beginnings on."""
    await asyncio.sleep(_BURST_S)
    begun, used = time.monotonic(), subject.cpu_s()
    await asyncio.sleep(seconds - 2 * _BURST_S)
    return (subject.cpu_s() - used) / (time.monotonic() - begun)


async def rate_at_half_load(subject: Streamer, streams: int, seconds: float) -> float:
    """Events/s over so many streams at which the gateway uses half of one core. A token costs less at a higher rate,
    as more of them come in one message; so the rate is approached from below."""
    rate = _FEW * streams
    for _ in range(_TRIALS):
        passage = await on_the_way(subject, streams, rate, seconds)
        rate *= 0.5 / passage.core
    return rate
