"""What a request wants, as far as placing it is concerned, and the settings that decisions depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from operator import add, sub
from types import MappingProxyType
from typing import NamedTuple

import msgspec


class HeldWork(NamedTuple):
    """What requests that are held back, and come before another one, will have a worker do."""

    prompt_tokens: int = 0
    """That it will compute."""
    sequences: int = 0
    context_tokens: int = 0

    def plus(self, other: HeldWork) -> HeldWork:
        """Both."""
        return HeldWork(*map(add, self, other))

    def minus(self, other: HeldWork) -> HeldWork:
        """What is left of it without a part."""
        return HeldWork(*map(sub, self, other))


Closed = Mapping[str, HeldWork]
"""Workers whose room is for others, who came before a request."""
OPEN: Closed = MappingProxyType({})
_NOTHING = HeldWork()


class Demand(msgspec.Struct, frozen=True):
    """One request, as far as placing it is concerned."""

    prompt_tokens: int
    """Tokens whose KV must exist before the next one can be sampled; a moved request's output counts."""
    expected_output: int
    home_prefill: str = ""
    home_decode: str = ""
    avoid: frozenset[str] = frozenset()
    opening: bytes = b""
    """Names the first blocks of the prompt; empty when it has fewer."""
    waits: bool = False
    """It can be held back until the workers that are best for it have room."""
    closed: Closed = OPEN
    first_token_s: float = inf
    """It is of no use when its first token comes later than this."""
    token_s: float = inf
    """Likewise each of the others, after the one before."""
    begun: bool = False
    """A part of the answer exists."""

    def ahead(self, worker: str) -> HeldWork:
        """What is held back for that worker before it."""
        return self.closed.get(worker, _NOTHING) if self.closed else _NOTHING

    @property
    def has_target(self) -> bool:
        """Whether it has to have its tokens in time."""
        return self.first_token_s < inf or self.token_s < inf


@dataclass(frozen=True, slots=True)
class Knobs:
    """The settings that decisions depend on."""

    local_prefill_tokens: int = 1_000_000
    """Most that a decode worker computes of a prompt while others are there for that."""
    max_queue_s: float = 120.0
    hold_s: float = 1.0
    """Seconds of prompts before it that a worker has to have, so that a request is rather held back."""
    tie: float = 0.05
    """Costs within this fraction of the least are nearly equal."""
    home_margin: float = 0.1
    """A session stays where it was when that costs at most this fraction (and 10 ms) more."""
