"""How much of a prompt a step may take along when others wait for their next token."""

from __future__ import annotations

LEAST_TOKENS = 16
"""However late the running streams are, prompts get on by so much in each step."""
_LEAST_SHARE = 0.5
"""Of a decode step's time; prompts get as much of every step, also where the target is less than decoding takes."""
_UNKNOWN = 64
"""Tokens while nothing has been measured."""


def chunk_tokens(target_s: float | None, step_s: float, tokens_per_s: float, most: int) -> int:
    """Prompt tokens, between LEAST_TOKENS and `most`, that fit beside the decode rows of a step that should take
    `target_s` seconds; None is no target.

    `step_s` is what the decode rows take, `tokens_per_s` the rate of prompts, both as measured; 0 is not known. Beside
    a step that takes as long as the target, or longer, a prompt gets half of the step's time on top: it would not end
    otherwise.
    """
    if target_s is None:
        return most
    if tokens_per_s <= 0:
        return min(_UNKNOWN, most)
    room_s = max(target_s - step_s, _LEAST_SHARE * step_s)
    return max(min(LEAST_TOKENS, most), min(most, int(room_s * tokens_per_s)))
