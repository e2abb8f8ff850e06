"""What a request cost, exactly."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from penstock.gateway.answer import Answer
from penstock.gateway.flow import Account
from penstock.v1 import common_pb2

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
    retained_tokens: int = 0
    """Leading tokens of the prompts, and of their answers where these are kept too."""
    retained_s: float = 0.0
    """How long they are kept at least; 0: nothing is."""
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

    def add_retained(self, kept: Collection[common_pb2.Retained], block_size: int) -> None:
        """What was promised for one prompt, as each of its choices was told."""
        most = max(kept, key=lambda one: one.blocks)
        if most.blocks:
            self.retained_tokens += most.blocks * block_size
            self.retained_s = min(self.retained_s or most.seconds, most.seconds)

    def add_choice(self, answer: Answer, account: Account) -> None:
        """Charges a choice."""
        self.completion_tokens += answer.tokens
        self.reasoning_tokens += answer.reasoning_tokens
        self.drafted += account.drafted
        self.accepted += account.accepted
        for stage, seconds in account.times.items():
            self.times[stage] = max(self.times[stage], seconds)
