"""One choice's work for the mesh, in plain values: what is asked of workers and what they report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import PenstockError, Unavailable
from penstock.gateway.ask import Sampling

Stage = Literal["prefill", "decode"]
Finish = Literal["stop", "length"]
TIERS = ("worker", "gpu", "host", "nvme", "remote")
"""Where cached KV can come from, nearest first."""


@dataclass(frozen=True, slots=True)
class KeepWish:
    """A wish that leading blocks be kept."""

    seconds: float
    blocks: int = 0
    """0: every full block of the prompt and of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRequest:
    """What is to be generated for one choice."""

    id: str
    """Unique per choice."""
    model: str
    tenant: str
    namespace: bytes
    """Names the tenant to the store."""
    session: str
    """Digest of the client's session key; empty when it named none."""
    prompt_ids: Sequence[int]
    root: bytes
    """Of the block keys."""
    keys: Sequence[bytes]
    """Of every full block of the prompt."""
    sampling: Sampling
    """As the client gave it, but for the two below."""
    max_tokens: int
    seed: int
    keep: Sequence[KeepWish] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker that was chosen."""

    member: str
    address: str
    sources: Sequence[str] = ()
    """Stores of other hosts that hold what the store of its host lacks."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The workers of one attempt, as the router chose them."""

    decode: Placement
    prefill: Placement | None = None
    """None: the decode worker computes the prompt."""
    epoch: int = 1


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One generated token."""

    index: int
    """From 0 at the first token of the answer."""
    id: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()
    """(token, logprob), most probable first."""


@dataclass(frozen=True, slots=True)
class PromptUse:
    """Where the KV of the given tokens came from, as their worker counted it."""

    computed: int
    cached: Mapping[str, int]
    """Tokens by tier."""

    @property
    def total(self) -> int:
        """As many as were given, if the worker counts right."""
        return self.computed + sum(self.cached.values())


@dataclass(frozen=True, slots=True)
class Promised:
    """What the store promised to keep."""

    blocks: int = 0
    """Leading blocks of the sequence."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a worker reports at once. None: it says nothing of that."""

    stage: Stage
    tokens: Sequence[SampledToken] = ()
    finish: Finish | None = None
    use: PromptUse | None = None
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage: queue, fetch, prefill, decode."""
    drafted: int | None = None
    """So far."""
    accepted: int | None = None
    promised: Promised | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker failed by a fault of its own or of the way to it: another may do better. Nothing follows."""

    stage: Stage
    member: str
    error: PenstockError
    """For the client, if no other worker can be had."""
    silent: bool = False
    """The router hears nothing of it either."""


Report = Gain | Lost


def workers_failed() -> Unavailable:
    """For the client, when the workers of its request failed and no others could be had."""
    return Unavailable("the workers of the request failed; try again", code="unavailable", retry_after=1)
