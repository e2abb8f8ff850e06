"""What drafts cost a step, learned from the steps."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.fit import LinearFit
from penstock.engine.speculation.depths import StepSeconds

_UNITS = (1.0, 16.0, 16_384.0, 1.0, 8.0, 4.0)
"""Of the step itself, its sequences, the tokens of their context, whether it verifies any drafts, how many, and how
many sequences are drafted for meanwhile."""

_FIRST_STEPS, _OUTLIER = 4, 2.0
"""After so many steps, one that takes more than so many times what is expected is held up."""
_TOGETHER, _FROM = 4, 32
"""So many steps in a row without drafts are learned from together, after so many steps: arithmetic takes time, too."""


class HeldUp:
    """Knows steps that something has held up: what slows a machine now and then is no cost of drafts. Where one after
    the other takes so long, it is."""

    def __init__(self) -> None:
        self._last = False

    def without(self, seconds: float, expected_s: float) -> float:
        """What a step that took `seconds` counts as."""
        most_s = _OUTLIER * expected_s
        last, self._last = self._last, seconds > most_s
        return seconds if last else min(seconds, most_s)


@dataclass(slots=True)
class _PlainSteps:
    """Steps in a row, of as many sequences and without drafts, from which is not learned yet."""

    sequences: int = 0
    count: int = 0
    seconds: float = 0.0
    context: int = 0


class DraftCosts:
    """Seconds of decoding steps, as a linear function of what they compute, of one for each magnitude of the batch: a
    draft costs next to nothing beside one sequence, whose step reads weights, and a sequence's share beside many, whose
    step multiplies."""

    def __init__(self) -> None:
        self._fits: dict[int, LinearFit] = {}
        self._steps: dict[int, int] = {}
        self._plain = _PlainSteps()
        self._held_up = HeldUp()

    def learn(self, seconds: float, sequences: int, context: int, drafts: int, ahead: int) -> None:
        """A step of `sequences` sequences with `context` tokens together took `seconds`. It verified `drafts` drafts,
        and a drafter that may be on the same cores drafted for `ahead` sequences meanwhile."""
        steps, fit = self.steps(sequences), self._fit(sequences)
        quantities = (1.0, sequences, context, drafts > 0, drafts, ahead)
        if steps >= _FIRST_STEPS:
            seconds = self._held_up.without(seconds, fit.expected(quantities))
        self._steps[sequences.bit_length()] = steps + 1
        if not (drafts or ahead) and steps >= _FROM:
            self._hold(seconds, sequences, context)
        else:
            self._settle()
            fit.add(seconds, quantities)

    def _hold(self, seconds: float, sequences: int, context: int) -> None:
        if self._plain.sequences != sequences:
            self._settle()
        plain = self._plain
        plain.sequences, plain.count = sequences, plain.count + 1
        plain.seconds, plain.context = plain.seconds + seconds, plain.context + context
        if plain.count == _TOGETHER:
            self._settle()

    def _settle(self) -> None:
        """Learns from the steps that are held."""
        plain, self._plain = self._plain, _PlainSteps()
        if plain.count:
            quantities = (1.0, plain.sequences, plain.context / plain.count, False, 0, 0)
            self._fit(plain.sequences).add(plain.seconds / plain.count, quantities, plain.count)

    def steps(self, sequences: int) -> int:
        """How many steps were seen of that magnitude."""
        return self._steps.get(sequences.bit_length(), 0)

    def step(self, sequences: int, context: int) -> StepSeconds:
        """Of the next step; all 0 before the like was measured."""
        step, sequence, token, verify, row, _ = self._fit(sequences).known
        return StepSeconds(step + sequence * sequences + token * context, verify, row)

    def ahead(self, sequences: int) -> float:
        """Seconds by which a step is longer for each sequence that is drafted for meanwhile."""
        return self._fit(sequences).known[-1]

    def _fit(self, sequences: int) -> LinearFit:
        magnitude = sequences.bit_length()
        if magnitude not in self._fits:
            self._fits[magnitude] = LinearFit(_UNITS)
        return self._fits[magnitude]
