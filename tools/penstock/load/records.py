"""What became of each request."""

from __future__ import annotations

import msgspec

CANCELLED = "Cancelled"


class LoadRecord(msgspec.Struct, kw_only=True):
    """One request. Times are seconds since the begin of its round."""

    round: int = 0
    process: int = 0
    """Which of the client's processes sent it."""
    session: str
    turn: int = 0
    """Its place in its session, from 0 on."""
    agent: int = 0
    number: int = 1
    """Among the turns of its agent, from 1 on."""
    scheduled: float
    """When it was due."""
    sent: float
    """When it was sent."""
    first: float | None = None
    """When the first part of the answer came."""
    last: float | None = None
    """When the last part came."""
    ended: float = 0.0
    """When it was over, answered or not."""
    gaps: list[float] = []
    """Seconds between the parts."""
    sizes: list[int] = []
    """Tokens of each part; empty where the server does not tell them."""
    error: str = ""
    """Kind of the failure; empty when it was answered."""
    status: int = 0
    """Of HTTP; 0: there was no answer."""
    message: str = ""
    """What the failure said."""
    finish: str = ""
    refusals: int = 0
    """How often it was refused for now, and sent again."""
    planned_tokens: int = 0
    """Length of the prompt as planned."""
    planned_output: int = 0
    reusable: int = 0
    """Of the planned tokens, those that a cache without end would have."""
    prompt_tokens: int | None = None
    """As the server counts, like all below; None: it does not say."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    tiers: dict[str, int] | None = None
    """Cached tokens by the tier that they came from."""
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    cost: float | None = None

    @property
    def good(self) -> bool:
        """Whether it was answered."""
        return not self.error

    @property
    def cancelled(self) -> bool:
        """Whether the run ended before the answer did: neither answered nor failed."""
        return self.error == CANCELLED

    @property
    def tokens(self) -> int:
        """Tokens of the answer: those that came, where the server tells them, else as many as it counts; its parts,
        where it does not count."""
        if self.sizes:
            return sum(self.sizes)
        return self.output_tokens if self.output_tokens is not None else len(self.gaps) + (self.first is not None)

    @property
    def token_gaps(self) -> list[float]:
        """Seconds between each token and the one before, 0 within a part; empty where the server does not tell how many
        tokens a part has."""
        later = zip(self.gaps, self.sizes[1:], strict=True) if self.sizes else ()
        return [0.0] * (sum(self.sizes[:1]) - 1) + [gap for wait, size in later for gap in (wait, *[0.0] * (size - 1))]

    @property
    def ttft(self) -> float | None:
        """Seconds from when it was due to the first part of the answer."""
        return None if self.first is None else self.first - self.scheduled

    @property
    def latency(self) -> float:
        """Seconds from when it was due to the last part of the answer, or to its end where there was none."""
        return (self.ended if self.last is None else self.last) - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None with fewer than two."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)
