"""Where the time of a request went: parts that follow each other, so that they add up.

Up to the first token they are the way of the choice that had it first: `body` (until the body has arrived and is
read), `tokenize`, `plan` (until the workers that gave the token were chosen, failed attempts before it included), what
the worker that computed the prompt says of itself (`queue`, `fetch`, `prefill`), and `call`, the rest: the way to the
worker and back. Then `handoff`, until decode's first token, zero where one worker does both; `decode`, until the last
token, whatever happens in between; `send`, until the answer is written. Stages of a worker that run side by side count
once, as the later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

BEFORE_FIRST = ("body", "tokenize", "plan", "call", "queue", "fetch", "prefill")
"""The parts of the time to the first token."""
PARTS = (*BEFORE_FIRST, "handoff", "decode", "send")
"""The parts of the whole time."""
TIMES = (*PARTS, "first_token", "total")
_STAGES = ("prefill", "fetch", "queue")
"""Of the worker that computed the prompt, the last one first."""


@dataclass(slots=True, kw_only=True)
class Marks:
    """When the stages of one request ended, in seconds since its first byte; None: not yet."""

    body: float
    tokenize_s: float
    """Seconds; other waiting may come between it and the body."""
    planned: float | None = None
    first: float | None = None
    """The first token."""
    decoding: float | None = None
    """The first token that came from a decode worker."""
    last: float | None = None
    worker: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage, as the worker that computed the prompt counted them."""


def times(marks: Marks, now: float) -> dict[str, float]:
    """Seconds by part, when `now` seconds have passed since the first byte, and `first_token` and `total`."""
    first = now if marks.first is None else marks.first
    last = first if marks.last is None else marks.last
    planned = first if marks.planned is None else min(marks.planned, first)
    found = {"body": marks.body, "tokenize": marks.tokenize_s}
    found["plan"] = max(planned - marks.body - marks.tokenize_s, 0.0)
    room = first - planned
    for stage in _STAGES:
        found[stage] = min(marks.worker.get(stage, 0.0), room)
        room -= found[stage]
    found["call"] = room
    begun = first if marks.decoding is None else min(max(marks.decoding, first), last)
    found |= {"handoff": begun - first, "decode": last - begun, "send": max(now - last, 0.0)}
    found |= {"first_token": first, "total": now}
    return {name: found[name] for name in TIMES}


def server_timing(found: Mapping[str, float], names: Sequence[str], cached: Mapping[str, int]) -> str:
    """The value of the header Server-Timing: milliseconds, and beside `fetch` the tokens that came from each tier."""
    tiers = " ".join(f"{tier}={tokens}" for tier, tokens in cached.items() if tokens)
    said = {"fetch": f';desc="{tiers}"'} if tiers else {}
    return ", ".join(f"{name};dur={found[name] * 1e3:.3f}{said.get(name, '')}" for name in names)
