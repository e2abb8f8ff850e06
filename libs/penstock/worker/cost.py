"""What it would take to compute a block again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Estimates from the shape of the model and the prefill rate that this worker measures.

    A transformer's layer costs about 24 h^2 operations per token in its matrices, and 4 h p in attention at position
    p, h being the hidden size: a token at p costs 1 + p / (6 h) times the first one. The measured rate is taken for
    that of the beginning of prompts, so that blocks far inside are, if anything, valued too highly.
    """

    block_size: int
    hidden_size: int

    def seconds(self, first_token: int, tokens_per_s: float) -> float:
        """Of the block that begins at `first_token`; 0 while no rate is known."""
        if tokens_per_s <= 0:
            return 0.0
        middle = first_token + self.block_size / 2
        return self.block_size / tokens_per_s * (1 + middle / (6 * self.hidden_size))
