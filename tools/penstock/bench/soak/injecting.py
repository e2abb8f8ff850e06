"""Strikes the services of a mesh that runs, one after the other."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable

from penstock.bench.soak.faults import FaultPlan, SoakFault, needed_beside
from penstock.bench.soak.mesh import SoakMesh
from penstock.bench.soak.system import RunningProcess


class FaultInjector:
    """Injects what a plan draws."""

    def __init__(self, mesh: SoakMesh, plan: FaultPlan, sparing: Callable[[], bool]) -> None:
        """`sparing` says whether the first service of each kind shall live on."""
        self._mesh = mesh
        self._plan = plan
        self._sparing = sparing
        self.done: Counter[str] = Counter()
        """Faults by what and whom, such as `kill decode-0`."""

    async def run(self) -> None:
        """Until it is cancelled; then all that stand still go on. Raises NotBack."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                fault = self._plan.next(sparing=self._sparing())
                await asyncio.sleep(fault.after_s)
                try:
                    await self._mesh.until_up(fault.service, *needed_beside(fault.service, self._mesh.services))
                    process = RunningProcess.of(self._mesh.pids()[fault.service])
                except (KeyError, ProcessLookupError):
                    continue  # it has just ended by itself
                self.done[f"{fault.act} {fault.service}"] += 1
                if fault.act == "kill":
                    self._mesh.gone(fault.service)
                    process.send(signal.SIGKILL)
                else:
                    tasks.create_task(self._hold(process, fault))

    async def _hold(self, process: RunningProcess, fault: SoakFault) -> None:
        self._mesh.stopped.add(fault.service)
        process.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.hold_s)
        finally:
            self._mesh.stopped.discard(fault.service)
            process.send(signal.SIGCONT)  # it may be another one by now: the supervisor kills who stands still
