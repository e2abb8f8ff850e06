"""How many drafts a step verifies, of which sequences: as many as make the most tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MARGIN = 0.06
"""By how much drafts have to raise the tokens per second, as a share, so that noise does not decide."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """What a decoding step takes."""

    plain: float
    """Without drafts."""
    verify: float
    """More, with any."""
    row: float
    """More, for each of them."""

    def of(self, drafts: int) -> float:
        """Seconds of a step that verifies `drafts` drafts."""
        return self.plain + (self.verify + self.row * drafts if drafts else 0.0)

    def pays(self, sequences: int, drafts: int, hope: float = 1.0) -> bool:
        """Whether so many drafts, each of which is accepted with probability `hope`, raise the tokens per second."""
        return hope * drafts * self.plain > sequences * (self.verify + self.row * drafts)


FREE = StepSeconds(0.0, 0.0, 0.0)
"""Every draft pays."""


def depths(reaches: Sequence[Sequence[float]], step: StepSeconds, margin: float = 0.0) -> list[int]:
    """Of each sequence, how many of its drafts to verify.

    `reaches` are, by sequence, how likely each draft is accepted; they never rise, so of any number of drafts the
    likeliest ones are leading ones. A step gives each sequence a token, and the drafts that are accepted. No drafts are
    chosen unless they raise the tokens per second by more than `margin`, a share. Of steps
    that take no time all drafts are.
    """
    found = sorted(((reach, -at) for at, own in enumerate(reaches) for reach in own), reverse=True)
    chosen = [0] * len(reaches)
    best = best_count([reach for reach, _ in found], step, len(reaches), margin)
    for _, at in found[:best]:
        chosen[-at] += 1
    return chosen


def best_count(
    reaches: Sequence[float],
    step: StepSeconds,
    sequences: int,
    margin: float,
    *,
    instead: float = 0.0,
    more_s: Callable[[int], float] = lambda count: 0.0,
) -> int:
    """How many of these drafts, likeliest first, make the most tokens per second; 0 where none raise them by more than
    `margin`. Without any, a step of `sequences` sequences gives `instead` tokens more than one each; with some it takes
    `more_s` longer, by their number. Of steps that take no time all are."""
    if step.plain <= 0:
        return len(reaches)
    best, best_rate, tokens = 0, (1 + margin) * (sequences + instead) / step.plain, float(sequences)
    for count, reach in enumerate(reaches, 1):
        tokens += reach
        rate = tokens / (step.of(count) + more_s(count))
        if rate > best_rate:
            best, best_rate = count, rate
    return best
