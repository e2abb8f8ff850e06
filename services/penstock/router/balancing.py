"""The balancer's task: looks at the workers of each model, and tells one to flip where `balance` says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NoReturn

import structlog

from penstock.errors import PenstockError
from penstock.router.balancer import BalanceKnobs, Flip, Leaning, balance
from penstock.router.config import RouterConfig
from penstock.router.directing import Director, Instruction
from penstock.router.planner import Planner
from penstock.router.workers import WorkerState
from penstock.runtime.tasks import beside

_LOOK_S = 1.0
_LOG = structlog.get_logger("penstock.router")


class Balancing:
    """Owner of what the balancer remembers of each model."""

    def __init__(self, planner: Planner, director: Director, config: RouterConfig, clock: Callable[[], float]) -> None:
        self._planner = planner
        self._director = director
        self._knobs = BalanceKnobs(max(config.hold_s, 0.1), config.balance_dwell_s)
        self._clock = clock
        self._leanings: dict[str, Leaning] = {}

    async def keep(self) -> NoReturn:
        """Looks once a second."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for flip in self.look():
                await self._tell(flip)

    def look(self) -> list[Flip]:
        """What is to flip now: one worker of a model at most."""
        now, flips = self._clock(), []
        workers = self._workers(now)
        self._leanings = {model: self._leanings.get(model, Leaning()) for model in workers}
        for model, states in workers.items():
            flip, self._leanings[model] = balance(states, self._leanings[model], now, self._knobs)
            if flip is not None:
                flips.append(flip)
        return flips

    def _workers(self, now: float) -> dict[str, list[WorkerState]]:
        """Those that may get work, by model."""
        self._planner.refresh()
        found: dict[str, list[WorkerState]] = {}
        for seat in self._planner.registry:
            state = self._planner.state(seat.member.id)
            if state is not None and self._planner.registry.available(seat, now):
                found.setdefault(seat.member.model, []).append(state)
        return found

    async def _tell(self, flip: Flip) -> None:
        seat = self._planner.registry.get(flip.worker)
        if seat is None:
            return
        _LOG.info("the balancer flips a worker", member=flip.worker, role=flip.role.value)
        try:
            await self._director.tell(seat, Instruction(role=flip.role))
        except PenstockError as error:
            _LOG.warning("a worker was not flipped", member=flip.worker, reason=error.message)


@asynccontextmanager
async def balanced(balancing: Balancing, failed: Callable[[str], None], *, on: bool) -> AsyncIterator[None]:
    """The balancer works for the length of the block, if it is on."""
    if not on:
        yield
        return
    async with beside(balancing.keep, name="balance", on_failure="restart", failed=failed):
        yield
