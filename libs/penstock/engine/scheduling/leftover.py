"""What a step has left for sequences that yield, once all others have theirs.

Beside streams that is a small part of what the step takes anyway: a few rows more hardly make it longer where it mostly
reads weights. A step of their own is short, because a request that comes has to wait for its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

YIELDS_FROM = 1 << 60
"""Places from here on are those of sequences that yield: so they stand behind all others in every line, and are the
first to lose their pages."""
RESUMED_FROM = -YIELDS_FROM
"""Places from here to 0 are those of sequences that are resumed: they stand before all others."""
BEFORE_ALL = RESUMED_FROM - 1
"""No sequence has this place or one before it."""
_SHARE = 0.05
"""Of a step with streams that may go to those that yield: it is what they make it longer by."""
_BASES = 2.0
"""A step without others may last for so many times what the smallest takes: else it would compute next to nothing where
that is long."""
_FIRST_ROWS, _FIRST_TOKENS = 8, 64
"""In a step without others, before anything was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Seconds of a step that sequences which yield may add to it, and what they cost."""

    beside_s: float = 0.0
    """In a step with others."""
    alone_s: float = inf
    """In a step without; 0: there is none."""
    row_s: float = 0.0
    """Of a decode row."""
    context_s: float = 0.0
    """Of a decode row, for each token before it."""
    token_s: float = 0.0
    """Of a token of a prompt."""

    def row(self, length: int) -> float:
        """Of the decode row of a sequence with so many tokens."""
        return self.row_s + length * self.context_s

    def holds(self, lengths: Sequence[int], *, beside: bool) -> bool:
        """Whether a step, with others or without, may have the decode rows of sequences with so many tokens; without
        others one always, where there is such a step."""
        seconds = self.beside_s if beside else self.alone_s
        if seconds <= 0:
            return False
        return (len(lengths) <= 1 and not beside) or sum(map(self.row, lengths)) <= seconds

    def tokens(self, seconds: float) -> int:
        """Tokens of prompts that are computed in this time."""
        return int(min(seconds / self.token_s, 1 << 30)) if self.token_s else 1 << 30


ANY_LEFTOVER = Leftover()
"""All of a step without others, and nothing of the others'."""


def leftover(
    most_s: float, step: tuple[float, float, float], prefill_rate: float, streams: int, *, alone: bool
) -> Leftover:
    """What is left beside `streams` that run here. A step without them lasts for `most_s` about; there is none unless
    this worker is `alone` on its cores. `step` are the measured seconds of a step however small, of each sequence and
    of each token of context, `prefill_rate` tokens per second of prompts; 0: not known yet."""
    base_s, row_s, context_s = step
    alone_s = max(most_s, _BASES * base_s) - base_s if alone else 0.0
    if not base_s:
        row_s = most_s / _FIRST_ROWS
    token_s = 1 / prefill_rate if prefill_rate else most_s / _FIRST_TOKENS
    beside_s = _SHARE * (base_s + row_s * streams) if base_s else 0.0
    return Leftover(beside_s=beside_s, alone_s=alone_s, row_s=row_s, context_s=context_s, token_s=token_s)
