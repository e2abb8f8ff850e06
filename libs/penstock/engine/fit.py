"""What steps cost, learned from the steps."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

_MEMORY = 0.995
"""What a step weighs after the next one like it."""
_DOUBT = 300.0
"""How little the first guess is trusted, in units of one step, and what has not been told for long."""


class LinearFit:
    """Seconds as a linear function of what a step computes.

    Recursive least squares with forgetting (Haykin, "Adaptive Filter Theory", chapter 10), regularized as in Gunnarsson
    ("Combining tracking and regularization in recursive least squares identification", CDC 1996). A worker seldom sees
    all kinds of steps at a time: what the newest do not tell apart keeps what earlier ones said of it, however long
    that is.
    """

    def __init__(self, units: Sequence[float]) -> None:
        """`units`: of each quantity, of a size that makes their coefficients alike."""
        self._units = units
        self._weights = [0.0 for _ in units]
        self._told = [[(row == column) / _DOUBT for column in range(len(units))] for row in range(len(units))]
        """How much of each quantity, and of each two together, the steps have told; old ones fade to the least."""
        self._any = False
        self._known: list[float] | None = None
        """Of the weights; None: they have changed since."""

    @property
    def known(self) -> list[float]:
        """Seconds for each of every quantity, none of them negative, that are nearest to what the steps have told; 0 at
        first. Where quantities are not told apart, one that is taken for too dear is made up for by another that seems
        to take less than nothing: here it is taken for less.

        Those that would be negative are left out, and the others fitted again, until none is (as in Lawson and Hanson,
        "Solving Least Squares Problems", chapter 23, without taking any back in)."""
        if self._known is None:
            self._known = [weight / unit for weight, unit in zip(self._nearest(), self._units, strict=True)]
        return self._known

    def _nearest(self) -> list[float]:
        weights, free = self._weights, list(range(len(self._weights)))
        found = list(weights)
        while any(found[place] < 0 for place in free):
            free = [place for place in free if found[place] >= 0]
            out = [place for place in range(len(weights)) if place not in free]
            matrix = [[self._told[row][column] for column in free] for row in free]
            moved = _solved(matrix, [sum(self._told[row][place] * weights[place] for place in out) for row in free])
            found = [0.0] * len(weights)
            for place, more in zip(free, moved, strict=True):
                found[place] = weights[place] + more
        return found

    def expected(self, quantities: Sequence[float]) -> float:
        """Seconds of a step: never negative, and 0 at first. Nearer than what `known` adds up to where quantities are
        not told apart."""
        return max(0.0, _product(self._weights, self._scaled(quantities)))

    def add(self, seconds: float, quantities: Sequence[float], steps: int = 1) -> None:
        """A step took `seconds`, or so many `steps` did on average. The first guess is that the first quantity accounts
        for all of it."""
        x = self._scaled(quantities)
        if not self._any:
            self._any = True
            self._weights[0] = seconds / x[0]
        self._known = None
        error = seconds - _product(self._weights, x)
        memory = _MEMORY**steps
        told = [steps * value for value in x]
        for number, (row, value) in enumerate(zip(self._told, x, strict=True)):
            row[:] = [memory * before + value * other for before, other in zip(row, told, strict=True)]
            row[number] += (1 - memory) / _DOUBT
        gains = _solved(self._told, told)
        self._weights = [weight + error * gain for weight, gain in zip(self._weights, gains, strict=True)]

    def _scaled(self, quantities: Sequence[float]) -> list[float]:
        return [quantity / unit for quantity, unit in zip(quantities, self._units, strict=True)]


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    total: float = sum(map(mul, one, other))
    return total


def _solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x with matrix @ x = right, of a symmetric positive definite matrix: Gauss's elimination, which needs no pivots
    there. numpy has it too, but services without a model import this module and not numpy."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for place, pivot in enumerate(rows):
        for below in rows[place + 1 :]:
            factor = below[place] / pivot[place]
            if factor:
                for column in range(place + 1, size + 1):
                    below[column] -= factor * pivot[column]
    found = [0.0] * size
    for place in reversed(range(size)):
        row = rows[place]
        found[place] = (row[size] - _product(row[place + 1 : size], found[place + 1 :])) / row[place]
    return found


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
