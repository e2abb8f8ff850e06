"""How long answers are: learned from those that ended, and from those of which only a beginning was seen."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from penstock.router.sessions import Recent

_UNKNOWN = 256.0
"""Tokens of an answer of which nothing is known."""
_MEMORY = 0.9
"""What an answer weighs after the next one."""
_GROWTH = log(1.25)
"""Lengths that differ by less than a quarter are counted together."""
_LEAST = 0.01
"""What weighs less is forgotten."""


class Lengths:
    """The lengths of some answers, newer ones weighing more: a histogram over ranges that grow with the length, as in
    Masson, Rim, Lee, "DDSketch" (VLDB 2019). At most some 60 ranges."""

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[float, float]] = {}
        """Weight, and weighted sum of the lengths, by range."""

    @classmethod
    def of(cls, parts: Sequence[tuple[int, float, float]]) -> Lengths:
        """Those that `parts` tells of."""
        lengths = cls()
        lengths._ranges = {at: (weight, total) for at, weight, total in parts}
        return lengths

    def parts(self) -> list[tuple[int, float, float]]:
        """All that is known: number, weight and weighted sum of each range."""
        return [(at, weight, total) for at, (weight, total) in self._ranges.items()]

    def learn(self, tokens: int, *, ended: bool) -> None:
        """An answer of so many tokens ended, or was left when it had them: then it would have been one of those that
        are longer, as far as any are known."""
        aged = {at: (weight * _MEMORY, total * _MEMORY) for at, (weight, total) in self._ranges.items()}
        self._ranges = {at: pair for at, pair in aged.items() if pair[0] >= _LEAST}
        longer = {} if ended else {at: pair for at, pair in self._ranges.items() if pair[1] > tokens * pair[0]}
        whole = sum(weight for weight, _ in longer.values())
        for at, (weight, total) in longer.items():
            self._ranges[at] = weight + weight / whole, total + total / whole
        if not longer:
            at = int(log(max(1, tokens)) / _GROWTH)
            weight, total = self._ranges.get(at, (0.0, 0.0))
            self._ranges[at] = weight + 1.0, total + tokens

    def left(self, tokens: int, limit: int) -> float | None:
        """Tokens that an answer of at most `limit` still gets when it has `tokens`, in the mean; None when none that is
        known was so long."""
        weights = more = 0.0
        for weight, total in self._ranges.values():
            mean = total / weight
            if mean > tokens:
                weights += weight
                more += weight * (min(mean, limit) - tokens)
        return more / weights if weights else None


class OutputLengths:
    """Lengths of the answers of each session, tenant and model, as many as `size`; each expires after `ttl` seconds
    without an answer."""

    def __init__(self, size: int, ttl: float) -> None:
        self.known: Recent[tuple[str, ...], Lengths] = Recent(size, ttl)
        """By model, tenant and session; by model and tenant; by model."""

    def expect(self, names: tuple[str, str, str], limit: int, now: float, *, generated: int = 0) -> int:
        """Tokens of the next answer, at most `limit`, when it has `generated` already. `names`: model, tenant and
        session; the session's answers say it, else the tenant's, else the model's."""
        model, tenant, session = names
        lengths = (
            (self.known.get(names, now) if session else None)
            or self.known.get((model, tenant), now)
            or self.known.get((model,), now)
        )
        if lengths is None:
            left = max(_UNKNOWN - generated, generated / 2)
        else:
            found = lengths.left(generated, limit)
            left = generated / 2 if found is None else found
        return max(1, min(limit, round(generated + left)))

    def learn(self, names: tuple[str, str, str], tokens: int, now: float, *, ended: bool = True) -> None:
        """An answer of so many tokens ended, or was left by its client when it had them."""
        for key in _keys(names):
            lengths = self.known.get(key, now) or Lengths()
            lengths.learn(tokens, ended=ended)
            self.known.set(key, lengths, now)

    def keys(self, names: tuple[str, str, str]) -> list[tuple[str, ...]]:
        """Under which an answer of that model, tenant and session is learned."""
        return _keys(names)

    def load(self, names: tuple[str, ...], parts: Sequence[tuple[int, float, float]], at: float) -> None:
        """What somebody else knew at that time; what is known since then stays."""
        self.known.merge(names, Lengths.of(parts), at)


def _keys(names: tuple[str, str, str]) -> list[tuple[str, ...]]:
    model, tenant, session = names
    keys: list[tuple[str, ...]] = [(model, tenant), (model,)]
    return [names, *keys] if session else keys
