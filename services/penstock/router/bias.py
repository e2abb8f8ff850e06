"""What was predicted of plans beside what happened."""

from __future__ import annotations

from dataclasses import dataclass

_PULL = 0.1
"""How far one plan pulls the belief."""
_MOST = 4.0
"""Nothing is believed to take more than so many times as long as its worker says, or to be more than so many times as
quick."""
_HALF_LIFE_S = 300.0
"""After so long without a plan, half of what was learned is forgotten: who is believed to be slow, and so gets nothing
to show that it is not, is tried again."""
_LEAST_S = 0.02
"""What takes less says nothing: it is all overhead."""
_LEAST_TOKENS = 8


@dataclass(slots=True)
class Bias:
    """How many times as long something takes at one worker as that worker's own rates say: what they predict next is
    multiplied by it.

    It is the mean of what happened over what was predicted without it, newer plans weighing more. That many plans were
    made with an older factor, and end one after the other, does not make it swing then: each says the same.
    """

    value: float = 1.0
    changed_at: float = 0.0

    def believed(self, now: float) -> float:
        """The factor by now."""
        faded: float = self.value ** (0.5 ** ((now - self.changed_at) / _HALF_LIFE_S))
        return faded

    def learn(self, ratio: float, factor: float, now: float) -> None:
        """Something took `ratio` times as long as was predicted with `factor`."""
        self.value = self.believed(now) ** (1 - _PULL) * _within(ratio * factor) ** _PULL
        self.changed_at = now


@dataclass(slots=True)
class Watched:
    """One plan on its way, in seconds of the router's clock."""

    made_at: float
    first_token_s: float
    """Predicted, as those below."""
    handoff_s: float
    """Between the first token and the second, beside what each takes: a wait for room too."""
    token_s: float
    """Of each token after the first."""
    prompt_factor: float = 1.0
    """What the first of these was multiplied by."""
    token_factor: float = 1.0
    """Likewise the last."""
    first_at: float | None = None
    first: int = 0
    """Tokens that there were at `first_at`."""
    last_at: float = 0.0
    last: int = 0

    def saw(self, tokens: int, now: float) -> float | None:
        """So many tokens exist now. Returns how many times as long as predicted the first one took, once, if that says
        something."""
        self.last_at, self.last = now, tokens
        if self.first_at is not None:
            return None
        self.first_at, self.first = now, tokens
        took = now - self.made_at
        return took / self.first_token_s if min(took, self.first_token_s) >= _LEAST_S else None

    def ended(self) -> float | None:
        """Likewise of the tokens after the first, as far as they were seen."""
        more = self.last - self.first
        if self.first_at is None or more < _LEAST_TOKENS or self.token_s <= 0:
            return None
        return (self.last_at - self.first_at) / self.rest_s

    @property
    def rest_s(self) -> float:
        """What was predicted from the first token to the last that was seen."""
        return self.handoff_s + (self.last - self.first) * self.token_s


def _within(ratio: float) -> float:
    return min(_MOST, max(1 / _MOST, ratio))
