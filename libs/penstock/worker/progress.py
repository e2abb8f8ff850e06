"""How long a worker may be without progress before it counts as dead, by what its engine expects of its steps.

A worker that hangs looks like one that computes: it reports, and no token comes. What tells them apart is how long the
step should have taken. A slow machine, or a large chunk of a prompt, has long steps, and is expected to.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.stats import EngineStats

_TIMES = 10.0
"""A step is overdue after so many times what it was expected to take: a machine that is ten times as busy as a moment
ago is seldom."""
_LEAST_STEP_S = 2.0
_LEAST_TOKEN_S = 3.0
"""Longer than a step may take: the router, which sees all workers, is the first to take one for dead."""


class IdleWatch:
    """Finds an engine that begins no step although sequences wait for one, or whose loop hangs between two steps.

    That counts as a step of which nobody knows how long it may take. Sequences may also wait for pages that are being
    stored, which ends within the store's time limit.
    """

    def __init__(self) -> None:
        self._steps = (-1, -1)
        self._since = 0.0
        """When the engine was last seen without anything to do, in a step or further than before."""

    def seen(self, stats: EngineStats, now: float) -> EngineStats:
        """The statistics, to be asked for more often than the limit; where no step is computed but should be,
        `in_step_s` is how long that has been so."""
        steps = (stats.steps, stats.failed_steps)
        nothing_to_do = stats.resting and not (stats.running or stats.waiting)
        if stats.in_step_s or nothing_to_do or steps != self._steps:
            self._steps, self._since = steps, now
            return stats
        return replace(stats, in_step_s=now - self._since, expected_s=0.0)


def limit_s(stats: EngineStats, unknown_s: float) -> float:
    """Seconds that the step in progress may take; `unknown_s` where nobody can tell: the like of it has never been
    measured, or it waits for cores that others use."""
    if stats.in_step_s and not stats.expected_s:
        return unknown_s
    return max(_LEAST_STEP_S, _TIMES * max(stats.expected_s, stats.decode_step_s))


def overdue(stats: EngineStats, unknown_s: float) -> bool:
    """Whether the step in progress takes longer than it may."""
    return stats.in_step_s > limit_s(stats, unknown_s)


def patience_s(stats: EngineStats, unknown_s: float) -> float:
    """Seconds that a stream may go without a token. Where sequences wait for room, one that has lost its own is among
    them perhaps, and would come behind the others elsewhere."""
    least_s = unknown_s if stats.waiting else _LEAST_TOKEN_S
    return max(least_s, limit_s(stats, unknown_s))
