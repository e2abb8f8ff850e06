"""The tokens of one sequence in one step, in plain Python: the scheduler chooses them, the model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.engine.sampling.choice import Choice

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Run:
    """Consecutive tokens of one sequence in one step, drafts included. `aim` reuses the object for each step."""

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
    shared: bool = False
    """Whether other sequences may use the blocks that it fills."""
    featured: bool = False
    """Whether the step is to give its features."""
    tokens: int = field(init=False)
    """Number of tokens, drafts included; each is one row of the step."""
    end: int = field(init=False)
    """Position behind the last token's."""
    sound: bool = field(init=False)
    """False when a block that the step has filled, and that others may use, does not hold finite numbers only."""
    samples: int = field(init=False)
    """How many of its last tokens are sampled after: 0 while known tokens are left for later steps."""
    features: Tensor | None = field(init=False)
    """[tokens, layers * hidden], once the step is computed, if they were asked for: see Features."""

    def __post_init__(self) -> None:
        self.aim(self.start, self.known, self.choice.drafts)

    def aim(self, start: int, known: int, drafts: tuple[int, ...]) -> None:
        """Chooses the tokens: `known` ones from position `start` on, and the drafts behind them."""
        self.start, self.known = start, known
        self.sound = True
        self.features = None
        choice = self.choice
        choice.drafts = drafts
        self.tokens = known + len(drafts)
        self.end = start + self.tokens
        self.samples = 1 + len(drafts) if start + known == len(choice.tokens) else 0

    @property
    def ids(self) -> Sequence[int]:
        """Ids of the known tokens, then of the drafts."""
        known = self.choice.tokens[self.start : self.start + self.known]
        return [*known, *self.choice.drafts] if self.choice.drafts else known
