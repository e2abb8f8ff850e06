"""Made-up workloads whose load changes with the time: requests come by chance, prompts and answers are of unlike sizes,
and nothing that they begin with is common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from penstock.traces.reading import RecordedAsk, Trace

_BLOCK = 512
_LEAST = 32
"""Tokens of a prompt and of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WavePhase:
    """A part of a period."""

    seconds: float
    per_s: float
    """Requests."""
    prompt: float
    """Tokens in the mean, as of the answer: exponentially distributed, above `_LEAST`."""
    answer: float


def wave(name: str, phases: Sequence[WavePhase], periods: int, seed: int = 1) -> Trace:
    """The phases, one after the other, again and again."""
    chance, asks, begin = Random(seed), [], 0.0
    for phase in [*phases] * periods:
        at, end = begin, begin + phase.seconds
        while (at := at + chance.expovariate(phase.per_s)) < end:
            tokens, output = (
                _LEAST + round(chance.expovariate(1 / (mean - _LEAST))) for mean in (phase.prompt, phase.answer)
            )
            asks.append(RecordedAsk(at, tokens, output, (), ""))
        begin = end
    return Trace(name, _BLOCK, tuple(asks))
