"""What steps cost, learned from the steps."""

from __future__ import annotations

from collections.abc import Sequence

_MEMORY = 0.995
"""What a step weighs after the next one."""
_DOUBT = 100.0
"""How little the first guess is trusted, in units of one step; no coefficient is ever doubted more."""


class LinearFit:
    """Seconds as a linear function of what a step computes.

    Recursive least squares with forgetting (Haykin, "Adaptive Filter Theory", chapter 10). A worker seldom sees all
    kinds of steps at a time: what the newest do not tell apart keeps what earlier ones said of it.
    """

    def __init__(self, units: Sequence[float]) -> None:
        """`units`: of each quantity, of a size that makes their coefficients alike."""
        self._units = units
        self._weights = [0.0 for _ in units]
        self._doubt = [[_DOUBT * (row == column) for column in range(len(units))] for row in range(len(units))]

    @property
    def known(self) -> list[float]:
        """Seconds for each of every quantity: never negative, and 0 at first."""
        return [max(0.0, weight) / unit for weight, unit in zip(self._weights, self._units, strict=True)]

    def add(self, seconds: float, quantities: Sequence[float]) -> None:
        """A step took `seconds`. The first guess is that the first quantity accounts for all of it."""
        x = [quantity / unit for quantity, unit in zip(quantities, self._units, strict=True)]
        if not any(self._weights):
            self._weights[0] = seconds / x[0]
        gains = [sum(p * value for p, value in zip(row, x, strict=True)) for row in self._doubt]
        scale = 1 / (_MEMORY + sum(gain * value for gain, value in zip(gains, x, strict=True)))
        error = seconds - sum(weight * value for weight, value in zip(self._weights, x, strict=True))
        self._weights = [weight + scale * error * gain for weight, gain in zip(self._weights, gains, strict=True)]
        size = len(x)
        for row in range(size):
            for column in range(size):
                self._doubt[row][column] = (self._doubt[row][column] - scale * gains[row] * gains[column]) / _MEMORY
        for at in range(size):
            if self._doubt[at][at] > _DOUBT:
                shrink: float = (_DOUBT / self._doubt[at][at]) ** 0.5
                for other in range(size):
                    self._doubt[at][other] *= shrink
                    self._doubt[other][at] *= shrink


class StepFit(LinearFit):
    """Of a decoding step, by its sequences and the tokens of their context."""

    def __init__(self) -> None:
        super().__init__((1.0, 16.0, 16_384.0))

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds of a step, for each sequence, and for each token of context: never negative, and 0 at first."""
        base, sequence, token = self.known
        return base, sequence, token

    def learn(self, seconds: float, sequences: int, context_tokens: int) -> None:
        """A step took `seconds`."""
        self.add(seconds, (1.0, sequences, context_tokens))


class PromptFit(LinearFit):
    """Of what a step computes of prompts, by its tokens and by the tokens that they attend to."""

    def __init__(self) -> None:
        super().__init__((256.0, 256.0 * 4096))

    @property
    def coefficients(self) -> tuple[float, float]:
        """Seconds for each token, and for each token of the context before it: never negative, and 0 at first."""
        token, context = self.known
        return token, context

    def learn(self, seconds: float, portions: Sequence[tuple[int, int]]) -> None:
        """So many seconds of a step went into prompts; `portions`: of each prompt the position of its first token in
        the step, and how many there were."""
        tokens = sum(count for _, count in portions)
        self.add(seconds, (tokens, sum(count * (start + count / 2) for start, count in portions)))
