"""The cost of computing a block: the store's assumption, and the figures that workers report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of prefill by position: each token costs the same, plus attention over all tokens before it.

    `even_at` is the position where attention costs as much as everything else. For a dense transformer of width d
    with the usual proportions (12 d^2 weights per layer: 24 d^2 operations per token, 4 d p for attention at
    position p) that is 6 d: 24,576 tokens at d = 4096. A rate that was measured over whole prompts is taken for that
    of their beginning, so that blocks far inside are, if anything, valued too highly.
    """

    tokens_per_s: float = 10_000.0
    """At the start of a prompt."""
    even_at: int = 24_576

    @classmethod
    def of_model(cls, hidden_size: int, tokens_per_s: float) -> PrefillCost:
        """For a dense transformer of that width."""
        return cls(tokens_per_s, 6 * hidden_size)

    def seconds(self, first_token: int, tokens: int) -> float:
        """For `tokens` tokens, the first at position `first_token`."""
        middle = first_token + tokens / 2
        return tokens / self.tokens_per_s * (1 + middle / self.even_at)
