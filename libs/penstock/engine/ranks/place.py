"""What a process that computes a part of a model has to do with the others in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from penstock.engine.config import EngineConfig
from penstock.engine.pictures.shown import ShownRows


def rank_config(config: EngineConfig, stage: int, rank: int) -> EngineConfig:
    """As a rank of a stage has it: with the device on which it computes."""
    first = 0 if config.stages_apart else stage * config.tp
    return replace(config, device=config.devices[first + rank])


class RankStep(NamedTuple):
    """A step, as one of several processes computes it."""

    states: Tensor | None
    """[rows, hidden]: what the stage before has made of the rows; None: there is none."""
    done: Callable[[Tensor], Tensor]
    """Takes what this process has made of them; on rank 0, where there are no other stages, it gives the logits of all
    tokens."""
    shown: ShownRows | None = None
    """What stands in the place of tokens' embeddings; None: nothing, or the stage before has seen to it."""
