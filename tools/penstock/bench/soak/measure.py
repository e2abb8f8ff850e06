"""`penstock bench soak`: a mesh under load whose services die and stand still, from its start until it is at rest."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from penstock.bench.harness import BenchReport
from penstock.bench.soak.asking import SoakClient, SoakOutcome, SoakWish
from penstock.bench.soak.asks import TEXT, drawn
from penstock.bench.soak.batch import SoakBatch
from penstock.bench.soak.faults import FaultPlan
from penstock.bench.soak.injecting import FaultInjector
from penstock.bench.soak.leaks import settled
from penstock.bench.soak.load import SoakPool, answered_pool, play
from penstock.bench.soak.memory import MemoryLog
from penstock.bench.soak.mesh import TENANTS, SoakMesh, places, soak_mesh
from penstock.bench.soak.options import SoakOptions
from penstock.bench.soak.report import SoakReport
from penstock.bench.soak.tally import SoakTally, slower
from penstock.runtime.tasks import Background, beside


async def measure(options: SoakOptions) -> BenchReport:
    """Runs the bench; what went wrong is told on standard error."""
    report = await soak(options)
    console = Console(stderr=True)
    for problem in report.problems:
        console.print(f"[red]{escape(problem)}[/]", soft_wrap=True)
    for line in (*report.tally.told, *report.complaints):
        console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
    return BenchReport("soak", report.figures())


async def soak(options: SoakOptions) -> SoakReport:
    """One run, on a mesh of its own."""
    with TemporaryDirectory(prefix="penstock-soak-") as directory:
        async with soak_mesh(options, Path(directory)) as mesh:
            return await _Soak(options, mesh).run()


class _Soak:
    def __init__(self, options: SoakOptions, mesh: SoakMesh) -> None:
        self._options = options
        self._mesh = mesh
        self._client = SoakClient(mesh.gateways, options)
        self._memory = MemoryLog()
        self._pool = SoakPool((), {})
        self._tally = SoakTally({})

    async def run(self) -> SoakReport:
        """Calm, faults, calm, rest."""
        options, clock = self._options, asyncio.get_running_loop().time
        self._pool = await answered_pool(self._client, drawn(options.seed, options.pool), options.clients)
        self._tally = SoakTally(self._pool.right)
        begin = clock()
        async with _beside(lambda: self._memory.watch(self._mesh), "memory"):
            first = await self._calm("first")
            idle, early = await settled(self._mesh, None, options.settle_s)
            batch = SoakBatch(self._mesh.urls[0], next(iter(TENANTS)), self._pool.asks, options.batch_lines)
            await batch.begin()
            faults = await self._storm()
            for id, (name, heard) in (await batch.answers(options.deadline_s)).items():
                self._tally.take_line(id, name, heard)
            await self._warm()
            last = await self._calm("last")
        seconds = clock() - begin
        _, leaks = await settled(self._mesh, idle, options.settle_s)
        leaks += await self._fill_limits()
        median_ratio, tail_ratio = slower(first, last)
        return SoakReport(
            seed=options.seed,
            tally=self._tally,
            faults=faults,
            leaks=[*(f"before the faults: {leak}" for leak in early), *leaks],
            growth=self._memory.growth(),
            median_ratio=median_ratio,
            tail_ratio=tail_ratio,
            seconds=seconds,
            complaints=list(self._mesh.complaints),
            defects=self._mesh.defects,
        )

    async def _calm(self, phase: str) -> list[SoakOutcome]:
        """The same requests each time, while nobody dies."""
        found: list[SoakOutcome] = []

        def take(outcome: SoakOutcome) -> None:
            found.append(outcome)
            self._tally.take(outcome)

        with self._shown(f"{phase} calm requests", self._options.calm) as wishes:
            await play(self._client, wishes(phase), self._options.clients, take)
        return found

    async def _storm(self) -> dict[str, int]:
        """Requests while services die and stand still, until all are back; what was injected."""
        options, loop = self._options, asyncio.get_running_loop()
        count = max(0, options.requests - 2 * options.calm)
        end = loop.time() + options.seconds if options.seconds else math.inf
        asked = 0

        def half() -> bool:
            return asked > count / 2 or loop.time() > end - options.seconds / 2

        plan = FaultPlan(self._mesh.services, options.seed, options.fault_s)
        injector = FaultInjector(self._mesh, plan, half)

        def until_end(wishes: Iterator[SoakWish]) -> Iterator[SoakWish]:
            nonlocal asked
            for wish in wishes:
                if loop.time() > end:
                    return
                asked += 1
                yield wish

        with self._shown("requests with faults", count) as wishes:
            async with _beside(injector.run, "faults"):
                await play(self._client, until_end(wishes("storm")), options.clients, self._tally.take)
        await self._mesh.until_up()
        return dict(sorted(injector.done.items()))

    async def _warm(self) -> None:
        """Each of the pool once for each tenant, as it was before the first calm requests."""
        asks = [
            SoakWish(name=f"warm {ask.name}", ask=ask, api_key=key, gateway=number, streams=True)
            for ask in self._pool.asks
            for number, key in enumerate(TENANTS)
        ]
        await play(self._client, iter(asks), self._options.clients, self._tally.take)

    async def _fill_limits(self) -> list[str]:
        """As many requests of each tenant at once as it may have: one that is refused shows a place that was not given
        back."""
        ask = next(ask for ask in self._pool.asks if ask.path == TEXT and ask.body.get("ignore_eos"))
        found = []
        for key, tenant in TENANTS.items():
            wishes = [
                SoakWish(name=f"limit {number}", ask=ask, api_key=key, gateway=number, streams=True)
                for number in range(places(self._options))
            ]
            refused = 0

            def take(outcome: SoakOutcome) -> None:
                nonlocal refused
                refused += outcome.refusals.count(429)
                self._tally.take(outcome)

            await play(self._client, iter(wishes), len(wishes), take)
            if refused:
                found.append(f"gateways: {refused} places of {tenant}")
        return found

    @contextmanager
    def _shown(self, what: str, count: int) -> Iterator[Callable[[str], Iterator[SoakWish]]]:
        """Gives the wishes of a phase, and shows how many have been asked for."""
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task(what, total=count)

            def wishes(phase: str) -> Iterator[SoakWish]:
                for number in range(count):
                    bar.advance(task)
                    yield self._pool.wish(self._options, phase, number)

            yield wishes


def _beside(job: Callable[[], Coroutine[Any, Any, None]], name: str) -> AbstractAsyncContextManager[Background]:
    return beside(job, name=name, on_failure="stop", failed=lambda _name: None)
