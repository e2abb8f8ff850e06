"""How many answers will run when a new worker would be ready: state in, a number out.

Answers are long, so what a decode worker has to do changes slowly: of those that run now most will still run, and of
those that come most will not have ended. For how long they run is said by how many have ended of late, of so many that
ran: as of lifetimes of which most are not over (total time on test: Epstein and Sobel, "Life Testing", 1953). The mean
length of those that ended would say too little while long ones have begun, and too much while they end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, expm1, inf

from penstock.cli.scale.needs import WorkerPace

WINDOW = 6
"""Looks over which answers are averaged, ..."""
_SHORT = 2
"""... or the newest, where more run then."""
_ENOUGH = 20
"""Answers that ended: of fewer the mean length of late ones says more."""


@dataclass(frozen=True, slots=True)
class AnswersSeen:
    """The answers of a mesh at one look."""

    sequences: float
    """That run and wait."""
    generated_per_s: float
    """Tokens."""
    ended_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersCome:
    """What is known of those that come."""

    per_s: float
    tokens: float
    """Of one, in the mean of late ones."""


@dataclass(frozen=True, slots=True)
class AnswersExpected:
    """On workers that get new ones."""

    running: float
    """Now, those that wait among them."""
    soon: float
    """When a new worker would be ready."""
    tokens_per_s: float
    """Of these."""


def answers_expected(
    late: Sequence[AnswersSeen], come: AnswersCome, pace: WorkerPace, *, leaving: float, every_s: float, ahead_s: float
) -> AnswersExpected:
    """`late`: the last looks, the newest last, one every `every_s`; `leaving`: answers that run on workers that drain,
    where they end; `ahead_s`: until a new worker would be ready."""
    sequences, ended = _mean([one.sequences for one in late]), _mean([one.ended_per_s for one in late])
    generated = _mean([one.generated_per_s for one in late])
    known = generated > 0 and sequences > 0
    rate = generated / sequences if known else pace.step_tokens / max(1e-6, pace.step_s + pace.sequence_s)
    ends_s = sequences / ended if ended > 0 else inf
    lasts_s = ends_s
    if ended * every_s * len(late) < _ENOUGH:
        lasts_s = max(come.tokens / rate, ends_s if sequences > 0 else 0.0)
    running = max(sequences, _mean([one.sequences for one in late[-_SHORT:]]))
    soon = _left(late[-1].sequences - leaving, ends_s, ahead_s) + _new(come.per_s, lasts_s, ahead_s)
    return AnswersExpected(max(0.0, running - leaving), soon, soon * rate)


def _left(running: float, ends_s: float, ahead_s: float) -> float:
    """Of those that run, each as likely to end at any time."""
    return max(0.0, running) * exp(-ahead_s / max(1e-6, ends_s))


def _new(per_s: float, lasts_s: float, ahead_s: float) -> float:
    """Of those that come meanwhile."""
    return per_s * (ahead_s if lasts_s == inf else lasts_s * -expm1(-ahead_s / max(1e-6, lasts_s)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
