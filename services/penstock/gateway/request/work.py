"""One choice's work for the mesh, in plain values: the request to the workers and their reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from penstock.errors import Overloaded, PenstockError, Unavailable
from penstock.gateway.request.ask import Sampling
from penstock.runtime.drafts import DraftAccount

if TYPE_CHECKING:  # the flow of a request knows no messages
    from penstock.pictures.picture import ShownPicture

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
    """A request for one choice: its prompt and how to sample its answer."""

    id: str
    """Unique per choice."""
    model: str
    tenant: str
    namespace: bytes
    """Names the tenant to the store."""
    session: str
    """Digest of the client's session key; empty when the client sent no key."""
    prompt_ids: Sequence[int]
    pictures: Sequence[ShownPicture] = ()
    """In the prompt, in order."""
    root: bytes
    """The root of the block keys."""
    keys: Sequence[bytes]
    """The key of every full block of the prompt."""
    seal_key: bytes = field(default=b"", repr=False)
    """Of its tenant's sealed blocks; empty where blocks are not sealed."""
    adapter: str = ""
    """The fingerprint of the adapter that is added to the model; empty: none."""
    known_keys: int = 0
    """The first of them, which the session's last prompt ended with."""
    sampling: Sampling
    """The client's parameters; `max_tokens` and `seed` below take precedence."""
    max_tokens: int
    seed: int
    keep: Sequence[KeepWish] = ()
    weight: float = 1.0
    """Of its tenant beside others."""
    priority: int = 0
    """Beside others of its tenant: seconds later in line, or earlier."""
    first_token_by: float = inf
    """`time.perf_counter` at which its first token is of no use any more."""
    token_s: float = inf
    """Likewise for each of the others: seconds after the one before."""
    yields: bool = False
    """It is served only where nobody else wants to be."""
    interrupted: bool = False
    """Its answer had begun when something of the mesh failed."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker that was chosen."""

    member: str
    address: str
    sources: Sequence[str] = ()
    """Stores of other hosts that hold blocks which the store of this worker's host lacks."""
    mac: bytes = b""
    """Proves the plan to the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """What the router expected of a plan; see PlanReasons in router.proto."""

    first_token_s: float
    answer_s: float
    queue_s: float
    compute_s: float
    fetch_s: float
    pull_s: float
    penalty_s: float
    handoff_s: float
    room_s: float
    decode_s: float
    held_s: float
    cached_tokens: int
    remote_tokens: int
    resident_tokens: int
    store_tokens: int
    awaited_tokens: int
    uncached_tokens: int
    expected_output: int
    choices: int
    other_s: float | None
    home: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    """The workers of one attempt, as the router chose them."""

    decode: Placement
    prefill: Placement | None = None
    """None: the decode worker computes the prompt."""
    epoch: int = 1
    reasons: Reasons | None = None
    plan: str = ""
    """What the router calls it."""
    site: str = ""
    """Where the workers are; empty where the gateway knows no other site."""


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """One generated token."""

    index: int
    """From 0 at the first token of the answer."""
    id: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()
    """(token, logprob), most probable first."""
    proposer: str | None = None
    """Whose draft it was; empty: nobody's; None: nobody asks."""


@dataclass(frozen=True, slots=True)
class PromptUse:
    """Where the KV of the given tokens came from, as their worker counted it."""

    computed: int
    cached: Mapping[str, int]
    """Tokens by tier."""

    @property
    def total(self) -> int:
        """All tokens; equals the number of given tokens if the worker counts correctly."""
        return self.computed + sum(self.cached.values())

    def parted(self, last: int) -> tuple[PromptUse, PromptUse]:
        """The use of all but the last tokens, and that of these. What was computed comes behind what was cached, and
        of that the farthest tier's last."""
        rest, behind = last, dict.fromkeys(("computed", *reversed(TIERS)), 0)
        for source in behind:
            had = self.computed if source == "computed" else self.cached.get(source, 0)
            behind[source] = min(had, rest)
            rest -= behind[source]
        computed = behind.pop("computed")
        before = {tier: tokens - behind.get(tier, 0) for tier, tokens in self.cached.items()}
        return PromptUse(self.computed - computed, before), PromptUse(computed, behind)


@dataclass(frozen=True, slots=True)
class Promised:
    """The blocks that the store promised to keep, and for how long."""

    blocks: int = 0
    """Leading blocks of the sequence."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """One report of a worker. A field is None when the report does not mention it."""

    stage: Stage
    tokens: Sequence[SampledToken] = ()
    finish: Finish | None = None
    use: PromptUse | None = None
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage: queue, fetch, prefill, decode."""
    drafts: DraftAccount | None = None
    """So far."""
    promised: Promised | None = None


Reason = Literal["failed", "full"]
"""Why a member is avoided: by its own fault or that of the way there, or because it had no room."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker, or the connection to it, failed; another may succeed. It is the last report of this worker."""

    stage: Stage
    member: str
    error: PenstockError
    """The error for the client if no other worker is found."""
    silent: bool = False
    """The router does not hear from the worker either."""

    @property
    def reason(self) -> Reason:
        """Why the member is avoided."""
        return "full" if isinstance(self.error, Overloaded) else "failed"


Report = Gain | Lost


class Receiver(Protocol):
    """Hears what the workers of one plan report. Both functions return at once, and raise nothing."""

    def token(self, index: int, id: int) -> None:
        """One token of decode, of which there is nothing else to report."""
        ...

    def report(self, report: Report) -> None:
        """Anything else; a token that comes later has not overtaken it."""
        ...


def workers_failed() -> Unavailable:
    """The error for the client when the workers of its request failed and no others were found."""
    return Unavailable("the workers of the request failed; try again", code="unavailable", retry_after=1)
