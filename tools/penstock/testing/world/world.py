"""One schedule, from its beginning until everything has settled."""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from structlog.testing import capture_logs

from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.router.config import RouterConfig
from penstock.router.service import Router, open_router
from penstock.runtime.addresses import HostPort
from penstock.runtime.tasks import end
from penstock.testing.world import checks, model
from penstock.testing.world.gateway import HeardAnswer, PretendAsk, PretendGateway, open_gateway
from penstock.testing.world.network import Event, Network
from penstock.testing.world.parts import PretendPart
from penstock.testing.world.schedule import GATEWAY, Fault, Schedule, drawn
from penstock.testing.world.stage import staged
from penstock.testing.world.virtual import Endless, PretendProcess, VirtualLoop
from penstock.testing.world.worker import PretendWorker, open_worker

_READY_S = 20.0
"""Most seconds from the last repair until requests would be served."""
_SETTLE_S = 8.0
"""Most seconds after the last request: leases, reservations and what rests have ended by then."""
_LATE_S = 1.0
"""After its deadline a request has ended."""
_EXPECTED = frozenset({"connection refused"})
"""Errors in the log that are no defects."""


@dataclass(frozen=True, slots=True)
class Played:
    """What was found of a schedule."""

    schedule: Schedule
    wrong: Sequence[str]
    """What must not be; nothing, if all went well."""
    heard: Sequence[HeardAnswer]
    trace: Sequence[Event]
    virtual_s: float
    callbacks: int

    @property
    def digest(self) -> str:
        """Of all that was sent: equal when the same happened."""
        trace = [event[:4] if event[3].endswith("Attach answers") else event for event in self.trace]
        return hashlib.sha256(repr([*trace, self.wrong]).encode()).hexdigest()[:16]  # an arena's path has a real pid

    def __str__(self) -> str:
        lines = [
            f"seed {self.schedule.seed}: {', '.join(self.schedule.parts)}; {len(self.heard)} requests",
            *(f"  {fault}" for fault in self.schedule.faults),
            *(f"  WRONG: {one}" for one in self.wrong),
            f"  replay with: python -m penstock.testing.world --seed {self.schedule.seed} --count 1 --trace",
        ]
        return "\n".join(lines)


def played(seed: int) -> Played:
    """Plays the schedule of a seed."""
    return play(drawn(seed))


def play(schedule: Schedule) -> Played:
    """Plays a schedule, which takes no time and touches nothing outside of this thread."""
    loop = VirtualLoop()
    world = World(schedule, loop)
    collecting = gc.isenabled()
    gc.disable()  # what it finds would be found elsewhere in the next run
    try:
        with staged(world.network, schedule.seed), capture_logs() as world.log:
            try:
                loop.current = world.self
                loop.run_until_complete(world.self.run(world.run))
            except Endless as error:
                world.wrong(str(error))
            finally:
                loop.close()
    finally:
        if collecting:
            gc.enable()
    return Played(schedule, world.found, world.heard, world.network.trace, loop.now - 1000.0, loop.callbacks)


class World:
    """The parts of one schedule, what is done to them and what they answer."""

    def __init__(self, schedule: Schedule, loop: VirtualLoop) -> None:
        self.schedule = schedule
        self.network = Network(loop, Random(f"network {schedule.seed}"), schedule.weather)
        self.self = PretendProcess("world")
        self.heard: list[HeardAnswer] = []
        self.found: list[str] = []
        self.log: list[Any] = []
        self._loop = loop
        self._running: dict[str, asyncio.Task[None]] = {}
        """Requests, by their ids."""
        self._graves: list[PretendProcess] = []
        self._stopped_s = 0.0
        """For how long the gateway was stopped."""
        self._over = False
        loop.set_exception_handler(self._unhandled)
        self.routers: Sequence[PretendPart[Router]] = [
            PretendPart(f"router-{number}", partial(open_router, self._router_config(number)))
            for number in range(len(schedule.routers))
        ]
        self.store: PretendPart[KvStore] | None = (
            PretendPart("store", partial(open_kvstore, self._store_config())) if schedule.store else None
        )
        self.workers: Sequence[PretendPart[PretendWorker]] = [
            PretendPart(traits.name, partial(open_worker, traits, self.wrong)) for traits in schedule.workers
        ]
        opened = partial(open_gateway, schedule.routers, self._failed)
        self.gateway: PretendPart[PretendGateway] = PretendPart(GATEWAY, opened)

    def _router_config(self, number: int) -> RouterConfig:
        address = HostPort(self.schedule.routers[number])
        return RouterConfig(address=address, name=f"router-{number}", seed=1 + self.schedule.seed % 1000)

    def _store_config(self) -> KvStoreConfig:
        return KvStoreConfig(
            address=HostPort(self.schedule.store),
            host_bytes=8192 + self.schedule.slots * (model.BLOCK_BYTES + 8),
            host_id="host",
            router=tuple(map(HostPort, self.schedule.routers)),
            reserve_s=2.0,
            lease_s=4.0,
            cooling_s=0.5,
            eviction=self.schedule.eviction,
        )

    @property
    def parts(self) -> list[PretendPart[Any]]:
        """All of them."""
        return [*self.routers, *([self.store] if self.store else []), *self.workers, self.gateway]

    def wrong(self, what: str) -> None:
        """Something is not as it has to be."""
        if not self._over:
            self.found.append(f"{self._loop.now - 1000.0:.3f} s: {what}")

    def _failed(self, task: str) -> None:
        self.wrong(f"the background task {task} failed")

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.wrong(f"nobody handles {context.get('message')}: {context.get('exception')!r}")

    # -- its course

    async def run(self) -> None:
        """All of it, and whatever happens, its end."""
        try:
            await self._course()
        except Exception as error:
            self.wrong(f"the world itself has failed: {error!r}")
        await self._end()

    async def _course(self) -> None:
        for part in self.parts:
            part.launch()
        await self._until(self._serves, _READY_S, "the mesh never serves")
        if self.found:
            return
        before = len(self._loop.tasks_of(self.gateway.process))
        async with asyncio.TaskGroup() as tasks:
            for at, wanted in self.schedule.asks:
                tasks.create_task(self._ask(at, wanted))
            for fault in self.schedule.faults:
                tasks.create_task(self._befall(fault))
        await self._requests_end()
        if self.found:
            return
        again = "the mesh does not serve again when everything is mended"
        await self._until(lambda: self._serves() and self._idle(), _READY_S, again)
        self._begin(PretendAsk(id="probe", prompt=[1] * 20, max_tokens=9, seed=1, patience_s=20.0))
        await self._requests_end()
        if (last := self.heard[-1]).error is not None:
            self.wrong(f"a request fails when everything is mended: {last.error!r}")
        for one in self.heard:
            self._check(one)
        await self._settle(before)

    async def _settle(self, gateway_tasks: int) -> None:
        """Waits until nothing is on its way any more, and nobody has kept anything."""
        until = self._loop.now + _SETTLE_S
        await asyncio.sleep(2 * self.schedule.weather.late_s + 0.1)
        while left := list(checks.settled(self, gateway_tasks)):
            if self._loop.now > until:
                for what in left:
                    self.wrong(what)
                return
            await asyncio.sleep(0.1)

    def _serves(self) -> bool:
        gateway, known = self.gateway.served, {worker.name for worker in self.workers if worker.served}
        if gateway is None or len(known) < len(self.workers) or not gateway.view.serves(model.NAME):
            return False
        if self.store is not None and self.store.served is None:
            return False
        routers = [router.served for router in self.routers]
        return all(router is not None and checks.joined(router) == self._members() for router in routers)

    def _idle(self) -> bool:
        """A worker may still end what its gateway has heard to the end."""
        return not any(worker.served.running for worker in self.workers if worker.served)

    def _members(self) -> int:
        return len(self.workers) + (self.store is not None)

    async def _until(self, condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
        until = self._loop.now + seconds
        while not condition():
            if self._loop.now > until:
                self.wrong(otherwise)
                return
            await asyncio.sleep(0.05)

    async def _requests_end(self) -> None:
        for one in self.heard:
            await self._until(
                lambda one=one: one.ended is not None,  # type: ignore[misc]
                max(0.0, one.began + one.wanted.patience_s + _LATE_S + self._stopped_s - self._loop.now),
                f"{one.wanted.id} has not ended {_LATE_S:g} s after its deadline",
            )

    async def _ask(self, at: float, wanted: PretendAsk) -> None:
        await asyncio.sleep(at)
        await self.gateway.ready.wait()
        self._begin(wanted)

    def _begin(self, wanted: PretendAsk) -> None:
        assert self.gateway.served is not None
        heard = HeardAnswer(wanted, self._loop.now)
        self.heard.append(heard)
        serve = partial(self.gateway.served.serve, heard)
        task = self._running[wanted.id] = self.gateway.call(serve, "request", self._failed)
        task.add_done_callback(lambda _: self._gone(heard))

    def _gone(self, heard: HeardAnswer) -> None:
        """Nothing runs for a request any more, which may never have begun."""
        if heard.ended is None:
            heard.left, heard.ended = True, self._loop.now

    def _check(self, heard: HeardAnswer) -> None:
        """An answer is the right one, or there is an error in time."""
        name = heard.wanted.id
        for what in heard.wrong:
            self.wrong(f"{name}: {what}")
        if heard.tokens != list(heard.expected[: len(heard.tokens)]):
            self.wrong(f"{name} has other tokens than it should")
        if heard.error is None and not heard.left and len(heard.tokens) != len(heard.expected):
            self.wrong(f"{name} ended with {len(heard.tokens)} tokens of {len(heard.expected)}")

    # -- what goes wrong

    async def _befall(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        network, parts = self.network, {part.name: part for part in self.parts}
        network.trace.append((self._loop.now, "fault", fault.who, fault.act, fault.other))
        part = parts.get(fault.who)
        match fault.act:
            case "kill" if part is not None and part.up:
                self._kill(part)
                await asyncio.sleep(fault.seconds)
                part.launch()
            case "stop" if part is not None and part.up and part.process.running:
                await self._stop(part, fault.seconds)
            case "restart" if part is not None and part.up and part.process.running:
                await self._close(part)
                await asyncio.sleep(fault.seconds)
                part.launch()
            case "cut":
                network.cut(part.process, parts[fault.other].process)  # type: ignore[union-attr]
            case "hold":
                network.hold(part.process, parts[fault.other].process, fault.seconds)  # type: ignore[union-attr]
                await asyncio.sleep(fault.seconds)
            case "hang" | "slow" if part is not None and part.served is not None:
                await self._slow(part.served, fault)
            case "leave" if (task := self._running.get(fault.who)) is not None:
                task.cancel()

    def _kill(self, part: PretendPart[Any]) -> None:
        process = part.process
        part.killed()
        self.network.end(process)
        self._graves.append(process)
        self._leave_all(part)

    async def _close(self, part: PretendPart[Any]) -> None:
        if part is self.gateway:
            await end(*self._running.values())
        await part.close()
        self._leave_all(part)

    def _leave_all(self, part: PretendPart[Any]) -> None:
        """The clients of a gateway that has gone have left."""
        if part is self.gateway:
            self._running.clear()
            for one in self.heard:
                if one.ended is None:
                    one.left, one.ended = True, self._loop.now

    async def _stop(self, part: PretendPart[Any], seconds: float) -> None:
        process = part.process
        process.stop()
        if part is self.gateway:
            self._stopped_s += seconds
        await asyncio.sleep(seconds)
        if not process.dead:
            process.resume(self._loop)

    async def _slow(self, worker: PretendWorker, fault: Fault) -> None:
        if fault.act == "hang":
            worker.hang(True)
        else:
            worker.slowness = 20.0
        await asyncio.sleep(fault.seconds)
        worker.hang(False)
        worker.slowness = 1.0

    # -- its end

    async def _end(self) -> None:
        for entry in self.log:
            if entry["log_level"] in ("error", "critical") and entry["event"] not in _EXPECTED:
                told = {name: value for name, value in entry.items() if name != "log_level"}
                self.wrong(f"an error was logged: {told}")
        self._over = True
        for part in self.parts:
            part.process.dead = False
            part.process.resume(self._loop)
        for process in self._graves:
            process.resume(self._loop)
        for part in reversed(self.parts):
            await part.close()
        for process in [*self._graves, *(part.process for part in self.parts)]:
            await self._bury(process)

    async def _bury(self, process: PretendProcess) -> None:
        """Ends the tasks of a process."""
        for _ in range(20):
            tasks = self._loop.tasks_of(process)
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=5.0)
