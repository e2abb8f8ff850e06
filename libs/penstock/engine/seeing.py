"""Embeddings of pictures between an engine's steps: whose are computed next, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.engine.lane import Lane
from penstock.engine.pace import StepPace
from penstock.engine.pictures.shown import ShownTiles
from penstock.engine.scheduling.live import Live
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.stats import Counters

_TURN_S, _LEAST_TURN_S = 0.05, 0.005
"""For how long embeddings are computed at a time: where no stream waits for its next step, and at least where one
does."""


class Seeing:
    """Has embeddings computed that sequences lack, in turns with steps. Belongs to the engine's event loop."""

    def __init__(
        self,
        shown: ShownTiles | None,
        scheduler: Scheduler,
        counters: Counters,
        pace: StepPace,
        *,
        lane: Lane,
        hand_out: Callable[[], object],
        failed: Callable[[Live, Exception], object],
    ) -> None:
        """Without `shown` no sequence has pictures. `hand_out` lets readers know of the last step, meanwhile; `failed`
        hears of a sequence whose pictures can't be computed."""
        self._shown = shown
        self._scheduler = scheduler
        self._counters = counters
        self._pace = pace
        self._lane = lane
        self._hand_out = hand_out
        self._failed = failed

    async def go_on(self, *, between: bool) -> bool:
        """Has a part of what the next sequence lacks computed, for about as long as a step of the streams takes;
        whether there is such a sequence. `between`: no step is begun."""
        shown = self._shown
        if shown is None:
            return False
        live = self._scheduler.seeing()
        if live is None:
            if shown.begun:  # whoever wanted that has left
                await self._lane.call(shown.give_up)
            return False
        prompts, streams = self._scheduler.crowd()
        if live.request.yields and (prompts or streams or not self._pace.leftover(True).alone_s):
            return False
        if between:
            self._counters.begin()
        began, waited_s = time.monotonic(), self._pace.turns.waited_s
        seconds = min(_TURN_S, max(_LEAST_TURN_S, self._counters.decode_step_s)) if streams else _TURN_S
        try:
            await self._lane.call(self._look, shown, live, seconds, begun=self._hand_out)
        except Exception as error:
            self._failed(live, error)
        waited_s = self._pace.turns.waited_s - waited_s
        self._counters.looked(began, time.monotonic(), waited_s=waited_s, between=between)
        return True

    def _look(self, shown: ShownTiles, live: Live, seconds: float) -> None:
        """In the lane."""
        assert live.pictures is not None
        with self._pace.turn(()):
            shown.advance(live.pictures, live.computed, live.computed + self._scheduler.sight, seconds)
