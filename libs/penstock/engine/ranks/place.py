"""What a process that computes a part of a model has to do with the others in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from penstock.engine.pictures.shown import ShownRows


class RankStep(NamedTuple):
    """A step, as one of several processes computes it."""

    states: Tensor | None
    """[rows, hidden]: what the stage before has made of the rows; None: there is none."""
    done: Callable[[Tensor], Tensor]
    """Takes what this process has made of them; on rank 0, where there are no other stages, it gives the logits of all
    tokens."""
    shown: ShownRows | None = None
    """What stands in the place of tokens' embeddings; None: nothing, or the stage before has seen to it."""
