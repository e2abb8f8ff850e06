"""How many prompt tokens a step may compute while other streams wait for their next token.

A prompt holds up the streams by what computing it takes, in one step or in many. Many keep a long one's share of each
step small; a short one that is cut up only begins later. So short prompts are computed whole, one in a step.
"""

from __future__ import annotations

LEAST_TOKENS = 16
"""Prompts advance by at least this much in each step, however late the running streams are."""
_LEAST_SHARE = 0.5
"""Share of a decode step's time that prompts always get, also when decoding alone takes longer than the target."""
_UNKNOWN = 64
"""Tokens to take before the first measurement."""
_PER_PROMPT, _MOST_PATIENCE = 4.0, 8.0
"""Each prompt that waits behind the first one adds so many times the target, shared out among the streams; streams wait
at most so many times the target, however many prompts queue."""


def patience(prompts: int, streams: int) -> float:
    """By how much the target gives way when `prompts` wait beside `streams` that run.

    A step that is longer holds up every stream, and brings every prompt behind the first one forward. So one prompt
    keeps to the target, and where as many more wait as streams run it is five times as long.
    """
    return min(_MOST_PATIENCE, 1.0 + _PER_PROMPT * max(0, prompts - 1) / max(1, streams))


def attainable_s(target_s: float, step_s: float, tokens_per_s: float) -> float:
    """The target, or what a step with decode rows and a prompt takes at least, where that is longer: that is what gives
    way to a queue and to short prompts. Else a slow machine would cut prompts up, which costs it a part of each step,
    for a target that its streams miss anyway. Arguments as of `chunk_tokens`."""
    least_s = LEAST_TOKENS / tokens_per_s if tokens_per_s > 0 else 0.0
    return max(target_s, step_s + max(_LEAST_SHARE * step_s, least_s))


def room_s(target_s: float, step_s: float) -> float:
    """Seconds that prompts get beside a step of decode rows: what the target leaves, but half of that step's time in
    any case; otherwise they would never end."""
    return max(target_s - step_s, _LEAST_SHARE * step_s)


def chunk_tokens(target_s: float | None, step_s: float, tokens_per_s: float, most: int) -> int:
    """Prompt tokens, between LEAST_TOKENS and `most`, that a step with decode rows can take if it should last
    `target_s` seconds (None: without a target).

    `step_s` is the measured time of the decode rows, `tokens_per_s` the measured rate of prompts; 0: not known yet.
    """
    if target_s is None:
        return most
    if tokens_per_s <= 0:
        return min(_UNKNOWN, most)
    return max(min(LEAST_TOKENS, most), int(min(most, room_s(target_s, step_s) * tokens_per_s)))


def whole_tokens(target_s: float | None, step_s: float, tokens_per_s: float, most: int) -> int:
    """Most tokens of a prompt that a step with decode rows computes whole, for which streams wait no longer than for
    the longest queue; 0 without a target, or when nothing is known. Arguments as of `chunk_tokens`."""
    if target_s is None or tokens_per_s <= 0:
        return 0
    attainable = attainable_s(target_s, step_s, tokens_per_s)
    return chunk_tokens(_MOST_PATIENCE * attainable, step_s, tokens_per_s, most)


def enough_tokens(target_s: float | None, tokens_per_s: float) -> int | None:
    """Prompt tokens that fill a step by themselves: as many as take `target_s`. A prompt that came with others and ends
    there has its first token at once, instead of with theirs; None: as in `whole_tokens`."""
    if target_s is None or tokens_per_s <= 0:
        return None
    return max(LEAST_TOKENS, int(target_s * tokens_per_s))
