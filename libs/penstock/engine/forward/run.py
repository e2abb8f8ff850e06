"""What one sequence has in a step. Plain Python: the scheduler aims it, the model reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.sampling.choice import Choice


@dataclass(slots=True)
class Run:
    """Consecutive tokens of one sequence in one step, drafts included. Aimed again for each of its steps."""

    choice: Choice
    """How to sample; also holds the sequence's tokens and this step's drafts."""
    start: int
    """Position of the first token."""
    known: int
    """Tokens of the run that are known; the drafts follow them."""
    pages: Sequence[int]
    """Block table; covers every position of the run."""
    table: tuple[str, int]
    """Names the content of `pages`: a sequence and the version of its table."""
    tokens: int = field(init=False)
    """How many it has, drafts included: each is one row of the step."""
    end: int = field(init=False)
    """Position behind the last token's."""
    samples: int = field(init=False)
    """After how many of its last tokens the next one is sampled: none while known tokens are left for later steps."""

    def __post_init__(self) -> None:
        self.aim(self.start, self.known, self.choice.drafts)

    def aim(self, start: int, known: int, drafts: tuple[int, ...]) -> None:
        """Chooses the tokens: `known` ones from position `start` on, and the drafts behind them."""
        self.start, self.known = start, known
        choice = self.choice
        choice.drafts = drafts
        self.tokens = known + len(drafts)
        self.end = start + self.tokens
        self.samples = 1 + len(drafts) if start + known == len(choice.tokens) else 0

    @property
    def ids(self) -> Sequence[int]:
        """Its tokens."""
        known = self.choice.tokens[self.start : self.start + self.known]
        return [*known, *self.choice.drafts] if self.choice.drafts else known
