"""A step that fails is tried again in halves, so that only the sequences that make it fail are lost."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from penstock.engine.errors import EngineError
from penstock.engine.sampling.choice import Chosen
from penstock.engine.step.run import Run

Step = Callable[[Sequence[Run]], Awaitable[Sequence[list[Chosen] | EngineError]]]
_log = logging.getLogger(__name__)


async def answers_of(step: Step, runs: Sequence[Run]) -> list[list[Chosen] | EngineError]:
    """The answer to each run; an error too for each whose step fails when it is alone in it.

    The halving changes no token of the others: a sequence's tokens do not depend on the rest of its step. It costs two
    steps for each halving, so a culprit among n costs about 2 * log2(n) more steps, once.
    """
    try:
        return [*await step(runs)]
    except Exception as error:
        if len(runs) == 1:
            _log.exception("the step of %s failed", runs[0].table[0])
            return [error if isinstance(error, EngineError) else EngineError(f"the step failed: {error}")]
        _log.warning("a step of %d sequences failed, its halves are tried: %r", len(runs), error)
    half = len(runs) // 2
    return [*await answers_of(step, runs[:half]), *await answers_of(step, runs[half:])]
