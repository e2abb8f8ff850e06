"""What a decoding step costs, learned from the steps."""

from __future__ import annotations

_MEMORY = 0.995
"""What a step weighs after the next one."""
_DOUBT = 100.0
"""How little the first guess is trusted, in units of one step; no coefficient is ever doubted more."""
_UNITS = (1.0, 16.0, 16_384.0)
"""One, sequences and tokens of context, of a size that makes their coefficients alike."""


class StepFit:
    """Seconds of a step as a linear function of its sequences and of the tokens of their context.

    Recursive least squares with forgetting (Haykin, "Adaptive Filter Theory", chapter 10). A worker seldom sees all
    kinds of steps at a time: what the newest do not tell apart keeps what earlier ones said of it.
    """

    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0]
        self._doubt = [[_DOUBT * (row == column) for column in range(3)] for row in range(3)]

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds of a step, for each sequence, and for each token of context: never negative, and 0 at first."""
        base, sequence, token = (max(0.0, weight) / unit for weight, unit in zip(self._weights, _UNITS, strict=True))
        return base, sequence, token

    def learn(self, seconds: float, sequences: int, context_tokens: int) -> None:
        """A step took `seconds`."""
        x = (1.0, sequences / _UNITS[1], context_tokens / _UNITS[2])
        if not any(self._weights):
            self._weights[0] = seconds
        gains = [sum(p * value for p, value in zip(row, x, strict=True)) for row in self._doubt]
        scale = 1 / (_MEMORY + sum(gain * value for gain, value in zip(gains, x, strict=True)))
        error = seconds - sum(weight * value for weight, value in zip(self._weights, x, strict=True))
        self._weights = [weight + scale * error * gain for weight, gain in zip(self._weights, gains, strict=True)]
        for row in range(3):
            for column in range(3):
                self._doubt[row][column] = (self._doubt[row][column] - scale * gains[row] * gains[column]) / _MEMORY
        for at in range(3):
            if self._doubt[at][at] > _DOUBT:
                shrink: float = (_DOUBT / self._doubt[at][at]) ** 0.5
                for other in range(3):
                    self._doubt[at][other] *= shrink
                    self._doubt[other][at] *= shrink
