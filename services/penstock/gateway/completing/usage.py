"""The cost of a request, as counted by the services that did the work.

The prompt's tokens are counted by the gateway, which made them; where the KV of each came from is counted by the worker
that computed the prompt: tokens fetched and used by tier, tokens that its steps computed. That both agree,

    prompt = computed + worker + gpu + host + nvme + remote,

is a law that `Flow` checks with every report. This module does not enforce it: a client sees the workers' counts.

A prompt is charged once, by the first report of it: with several choices that of the first choice, whose blocks the
others fetch; in a disaggregated mesh prefill's, or decode's when the hand-off failed. Tokens that a fail-over or
a preemption computes or fetches again are the mesh's cost, not the client's; so is the KV of an answer's beginning that
another gateway had before it died.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from penstock.gateway.completing.account import ChoiceAccount
from penstock.gateway.completing.answer import Answer
from penstock.gateway.completing.prompts import SessionUse
from penstock.gateway.completing.timing import TIMES
from penstock.gateway.request.work import TIERS, Promised
from penstock.runtime.drafts import DraftAccount


@dataclass(slots=True)
class Usage:
    """The cost of a whole request."""

    prompt_tokens: int = 0
    charged_tokens: int = 0
    """Tokens of prompts that a worker has reported: all, unless the request still runs or has failed."""
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens whose KV was computed for this request."""
    cached: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    again: Counter[str] = field(default_factory=Counter)
    """Tokens by source that workers counted and that are not charged."""
    told_again: int = 0
    """Tokens that workers generated and that are no part of the answers."""
    recalled_tokens: int = 0
    """Tokens of the answers that were generated before, for the same request: see `stored_answers`."""
    drafts: DraftAccount = field(default_factory=DraftAccount)
    retained_tokens: int = 0
    """Leading tokens of the prompts, and of their answers where these are kept too."""
    retained_s: float = 0.0
    """Shortest time in seconds for which they are kept; 0 when no token is kept."""
    session: SessionUse | None = None
    """What the prompt took over from its session; None for a prompt that isn't a conversation."""
    dropped_messages: int = 0
    """Old messages that were left out of prompts which were too long, where the client asks for that."""
    dropped_tokens: int = 0
    """Tokens at the beginning of prompts that were left out, where the client asks for that."""
    seed: int = 0
    """Of the first choice: with it the request gives the same tokens again, while `fingerprint` is the same."""
    fingerprint: str = ""
    """See `system_fingerprint`."""
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))
    """See `timing`."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was reused."""
        return sum(self.cached.values())

    @property
    def written_tokens(self) -> int:
        """Prompt tokens that were new and that the store has promised to keep."""
        return max(min(self.retained_tokens, self.prompt_tokens) - self.cached_tokens, 0)

    def add_prompt(self, tokens: int, account: ChoiceAccount) -> None:
        """Charges a prompt, once, however many choices it has."""
        self.prompt_tokens += tokens
        if account.use is not None:
            self.charged_tokens += tokens
            self.computed_tokens += account.use.computed
            for tier in TIERS:
                self.cached[tier] += account.use.cached.get(tier, 0)

    def add_copy(self, account: ChoiceAccount) -> None:
        """Notes what a further choice of a prompt took of it, for which nobody is charged."""
        if account.use is not None:
            self.again.update({**account.use.cached, "computed": account.use.computed})

    def add_promised(self, promised: Collection[Promised], block_size: int) -> None:
        """Adds the store's promise for one prompt; `promised` has the promise that each of its choices got."""
        most = max(promised, key=lambda promise: promise.blocks)
        if most.blocks:
            self.retained_tokens += most.blocks * block_size
            self.retained_s = min(self.retained_s or most.seconds, most.seconds)

    def add_choice(self, answer: Answer, account: ChoiceAccount) -> None:
        """Charges a choice."""
        self.completion_tokens += answer.tokens
        self.reasoning_tokens += answer.reasoning_tokens
        self.told_again += account.received + account.recalled - answer.tokens
        self.recalled_tokens += account.recalled
        self.again.update(account.again)
        self.drafts.add(account.drafts)
