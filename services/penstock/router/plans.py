"""What a plan is made for, what it says, and what became of what it predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import msgspec

from penstock.router.options import Decision
from penstock.router.registry import Member
from penstock.router.running import RunningPlan


class PlanAsk(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    model: str
    prompt_tokens: int
    max_tokens: int
    tenant: str = ""
    session: str = ""
    block_keys: Sequence[bytes] = ()
    """Of the whole prompt, or those behind `after`."""
    after: bytes = b""
    """The key before them; empty: there is none."""
    avoid: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()
    """Those of `avoid` that had no room, by no fault of their own."""
    blamed: frozenset[str] = frozenset()
    """Those of `avoid` that were named by an earlier ask of the same request: a fault counts once."""
    output_tokens: int = 0
    kept: RunningPlan | None = None
    """Set: these members serve it already."""
    weight: float = 1.0
    """Of the tenant, beside others."""
    priority: int = 0
    """Beside others of its tenant; lower is earlier."""
    first_token_s: float = inf
    """It is of no use when its first token comes later than this."""
    token_s: float = inf
    """Likewise each of the others, after the one before."""
    yields: bool = False
    """It gets places that nobody else wants."""
    request_id: str = ""
    """Like the next two, only for the capabilities of its workers."""
    namespace: bytes = b""
    cache_root: bytes = b""
    returned: bool = False
    """Its client had left it, and asks again."""

    @property
    def begun(self) -> bool:
        """Whether some of its work is done, or was tried: it waits for nobody, unless its client had left it."""
        return (self.output_tokens > 0 and not self.returned) or bool(self.avoid)


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    number: int
    """Names the charge; the caller owes one `Planner.release`."""
    prefill: Member | None
    decode: Member
    cached_tokens: int
    uncached_tokens: int
    prefill_sources: Sequence[str] = ()
    """Addresses of other hosts' stores that hold what the prefill worker's store lacks, the deepest first."""
    decode_sources: Sequence[str] = ()
    decision: Decision
    expected_output: int
    home: bool
    """The session was at this decode worker before."""
    held_s: float = 0.0
    """Seconds for which it was held back."""


Predicted = Literal["first_token", "token"]
"""From the plan to the first token, and each of the others."""


@dataclass(frozen=True, slots=True)
class Happened:
    """What became of a prediction."""

    what: Predicted
    member: str
    predicted_s: float
    ratio: float
    """How many times as long as predicted it took."""
    bias: float
    """What the worker's next predictions are multiplied by."""
