"""How often a sequence has each token, for penalties."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Occurrences:
    """Which tokens a sequence has, up to some place."""

    seen: Tensor
    """bool [vocab]: in prompt or output."""
    counts: Tensor
    """float32 [vocab]: how often in the output."""
    until: int = 0
    """Leading tokens of prompt and output that are counted."""
