"""Loading a head for an engine."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from penstock.checkpoint import Checkpoint, inspect_head
from penstock.engine.config import EngineConfig
from penstock.engine.layers.embedding import Embedding
from penstock.engine.speculation.head.guessing import HeadGuesser
from penstock.engine.speculation.head.model import HeadModel
from penstock.runtime.config import ConfigError


@runtime_checkable
class GivesFeatures(Protocol):
    """What a head needs of the model that it guesses for; a Runner."""

    @property
    def embedding(self) -> Embedding:
        """Of the model."""
        ...

    def tap(self, layers: tuple[int, ...]) -> None:
        """Chooses after how many layers the features of a step are taken."""
        ...


def open_head(config: EngineConfig, checkpoint: Checkpoint, runner: object) -> HeadGuesser | None:
    """The head that the settings name; None: they name none, or it guesses elsewhere, for which steps keep states.
    Raises CheckpointError when it can't be used for this model."""
    if not config.has_head:
        return None
    if not isinstance(runner, GivesFeatures):
        raise ConfigError("draft_head", config.draft_head, "needs a model whose layers can be looked at")
    head = inspect_head(config.draft_head, checkpoint)
    runner.tap(head.layers)
    if config.tells_states:
        return None
    longest = config.context(checkpoint.config.max_positions)
    model = HeadModel(head, runner.embedding.rows, longest, runner.embedding.device)
    return HeadGuesser(model, runner.embedding.device)
