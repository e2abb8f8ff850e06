"""What a request cost, exactly."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.gateway.answer import Answer
from penstock.gateway.flow import Account

TIERS = ("gpu", "host", "nvme", "remote")
TIMES = ("tokenize", "plan", "queue", "fetch", "prefill", "first_token", "decode", "total")


@dataclass(slots=True)
class Usage:
    """Of a whole request. computed + cached = prompt tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    drafted: int = 0
    accepted: int = 0
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was reused."""
        return sum(self.cached.values())

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens whose KV was computed for this request."""
        return self.prompt_tokens - self.cached_tokens

    def add_prompt(self, tokens: int, account: Account) -> None:
        """Charges a prompt, once, however many choices it has."""
        self.prompt_tokens += tokens
        left = tokens
        for tier in TIERS if account.cache is not None else ():
            # A request that moved may report its own output as cached: that is no part of the prompt.
            part = min(getattr(account.cache, tier), left)
            self.cached[tier] += part
            left -= part

    def add_choice(self, answer: Answer, account: Account) -> None:
        """Charges a choice."""
        self.completion_tokens += answer.tokens
        self.reasoning_tokens += answer.reasoning_tokens
        self.drafted += account.drafted
        self.accepted += account.accepted
        for stage, seconds in account.times.items():
            self.times[stage] = max(self.times[stage], seconds)
