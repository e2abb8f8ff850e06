"""The tokens of one sequence in one step, in plain Python: the scheduler chooses them, the model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.engine.hooks import MOST_STATES
from penstock.engine.sampling.choice import Choice, Chosen

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.engine.errors import EngineError
    from penstock.engine.layers.adapters import AdapterWeights
    from penstock.engine.step.pictures import PictureRows, Turning


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
    adapter: AdapterWeights | None = None
    """What is added to the model for its rows."""
    pictures: PictureRows | None = None
    """What takes the place of tokens' embeddings."""
    tokens: int = field(init=False)
    """Number of tokens, drafts included; each is one row of the step."""
    end: int = field(init=False)
    """Position behind the last token's."""
    source: int | None = field(init=False)
    """The page whose first rows the step copies to the page of the run's first token, as many as are before that token
    in its block; None: they are there, or the run begins with the block. The source keeps the rows during the step."""
    sound: bool = field(init=False)
    """False when a block that the step has filled, and that others may use, does not hold finite numbers only."""
    tail_sound: bool = field(init=False)
    """Whether the step has ended a prompt or a sequence, and all that the last page holds of it is finite."""
    samples: int = field(init=False)
    """How many of its last tokens are sampled after: 0 while known tokens are left for later steps."""
    features: Tensor | None = field(init=False)
    """[featured_tokens, layers * hidden], once the step is computed, if they were asked for: see Features."""

    def __post_init__(self) -> None:
        self.aim(self.start, self.known, self.choice.drafts)

    def aim(self, start: int, known: int, drafts: tuple[int, ...], source: int | None = None) -> None:
        """Chooses the tokens: `known` ones from position `start` on, and the drafts behind them."""
        self.start, self.known, self.source = start, known, source
        self.sound, self.tail_sound = True, False
        self.features = None
        choice = self.choice
        choice.drafts = drafts
        self.tokens = known + len(drafts)
        self.end = start + self.tokens
        self.samples = 1 + len(drafts) if start + known == len(choice.tokens) else 0

    def concludes(self, answer: Sequence[Chosen] | EngineError) -> bool:
        """Whether the step, which gave `answer`, has ended a prompt or the sequence."""
        if not isinstance(answer, list) or not answer:
            return False
        if self.known > 1 or self.source is not None:
            return True
        choice = self.choice
        for chosen in answer:
            if chosen.token in choice.stops:
                return True
        return len(choice.tokens) + len(answer) >= choice.prompt_length + choice.params.max_tokens

    @property
    def featured_tokens(self) -> int:
        """How many of its last tokens have features: of the known ones those that a head looks at, and all drafts."""
        return min(self.known, MOST_STATES) + self.tokens - self.known if self.featured else 0

    def told(self, computed: int) -> tuple[int, Tensor]:
        """(position of the first, the features) of the tokens that are among the first `computed` of the sequence:
        others are drafts that were wrong."""
        assert self.features is not None
        begin = self.end - len(self.features)
        return begin, self.features[: max(0, computed - begin)]

    @property
    def turning(self) -> Turning | None:
        """How far they are turned; None: by their positions."""
        return self.pictures

    @property
    def shows(self) -> bool:
        """Whether any of its tokens are of pictures."""
        return self.pictures is not None and self.pictures.any_between(self.start, self.end)

    @property
    def ids(self) -> Sequence[int]:
        """Ids of the known tokens, then of the drafts."""
        known = self.choice.tokens[self.start : self.start + self.known]
        return [*known, *self.choice.drafts] if self.choice.drafts else known
