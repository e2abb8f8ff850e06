"""A step of an engine from its plan until its tokens are taken in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.delivery.outlet import Outlet
from penstock.engine.forward.runner import BegunStep
from penstock.engine.scheduling.live import Live
from penstock.engine.speculation.asking import AskedFor
from penstock.engine.step.run import Run


@dataclass(slots=True)
class Flight:
    """A step that is being computed."""

    step: Sequence[Live]
    outlets: list[Outlet]
    drafted: bool
    waited_s: float
    """How long steps had waited for their turns when it began."""
    asked: AskedFor
    """What its drafts were expected to bring."""
    began: float = field(default_factory=time.monotonic)
    runs: Sequence[Run] = field(init=False)
    begun: asyncio.Future[BegunStep] | None = None
    """What the first of several stages is doing, or has done."""
    adapters: Sequence[str] = field(init=False)
    """Fingerprints of those that it needs."""

    def __post_init__(self) -> None:
        self.runs = [live.run for live in self.step]
        self.adapters = [live.request.adapter for live in self.step if live.request.adapter]
