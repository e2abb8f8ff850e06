"""Every numeric bound of a request, in one table. Tests and fuzzers read it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Bound:
    """Inclusive limits."""

    low: float
    high: float


BOUNDS = {
    "max_tokens": Bound(1, 2**31 - 1),
    "max_completion_tokens": Bound(1, 2**31 - 1),
    "max_output_tokens": Bound(1, 2**31 - 1),
    "min_tokens": Bound(0, 2**31 - 1),
    "temperature": Bound(0, 100),
    "anthropic.temperature": Bound(0, 1),
    "top_p": Bound(0, 1),
    "top_k": Bound(-1, 2**31 - 1),
    "min_p": Bound(0, 1),
    "repetition_penalty": Bound(0.01, 100),
    "presence_penalty": Bound(-2, 2),
    "frequency_penalty": Bound(-2, 2),
    "logit_bias": Bound(-100, 100),
    "seed": Bound(-(2**63), 2**64 - 1),
    "n": Bound(1, 128),
    "truncate_prompt_tokens": Bound(-1, 2**31 - 1),
    "best_of": Bound(1, 128),
    "top_logprobs": Bound(0, 20),
    "logprobs": Bound(0, 20),
    "penstock.retain": Bound(1, 86_400),
    "penstock.session.returns_in": Bound(0, 86_400),
    "priority": Bound(-1000, 1000),
    "penstock.priority": Bound(-1000, 1000),
    "penstock.slo.ttft": Bound(0.001, 86_400),
    "penstock.slo.itl": Bound(0.0001, 86_400),
}
MAX_STOPS = 16
MAX_BAD_WORDS = 256
MAX_BAD_CHARACTERS = 8192
"""Of all of them together."""
MAX_TEXT = 256
"""Characters of a stop string, or of a bad word."""
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 65_536
MAX_MESSAGES = 10_000
MAX_TOOLS = 512
MAX_PROMPTS = 128
MAX_NODES = 1 << 16
"""JSON objects, arrays and members of objects in one request; 10,000 messages with their texts have 30,000."""
MAX_ITEMS = 1 << 19
"""JSON values in one request; a prompt of token ids has one for each token."""
MAX_SHOWN = 1 << 21
"""Token ids whose text is asked for in one request; far beyond any context."""
MAX_ESCAPES = 3 << 19
"""Backslashes in one request, since a decoder takes many times longer for an escape than for a letter."""
MAX_DEPTH = 100
"""Objects and arrays inside each other."""
MAX_HEADERS = 100
"""Headers of one request, trailers included."""
MAX_MARKS = 4
"""Messages and parts with cache_control."""


def bound_of(field: str, api: str = "") -> Bound | None:
    """The limits of a field, which may be narrower in one of the APIs; None: it has none."""
    return BOUNDS.get(f"{api}.{field}") or BOUNDS.get(field)


def check(name: str, value: float | None, field: str | None = None) -> None:
    """Raises InvalidRequest when `value` is outside of the bounds of `name`."""
    if value is None:
        return
    bound = BOUNDS[name]
    if not bound.low <= value <= bound.high:  # also false for a NaN
        what = f"{field or name}: must be between {number(bound.low)} and {number(bound.high)}"
        raise InvalidRequest(what, field=field or name)


def check_count(field: str, count: int, most: int) -> None:
    """Raises InvalidRequest when a list is too long."""
    if count > most:
        raise InvalidRequest(f"{field}: must have at most {most} entries, not {count}", field=field)


def check_texts(field: str, texts: Sequence[str], most: int) -> None:
    """Raises InvalidRequest when there are too many texts, or one is empty or too long."""
    check_count(field, len(texts), most)
    if not all(0 < len(text) <= MAX_TEXT for text in texts):
        raise InvalidRequest(f"{field}: each string must have 1 to {MAX_TEXT} characters", field=field)


def share(budget: int, choices: int) -> int:
    """Tokens that each of a request's choices may generate of those that all of them may."""
    return max(1, budget // choices)


def number(value: float) -> str:
    """The number as people write it: no exponent, no fraction of a whole number."""
    return str(int(value)) if float(value).is_integer() else f"{value:g}"
