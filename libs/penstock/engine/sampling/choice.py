"""The sampler's questions and answers. Plain Python, importable without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from penstock.engine.request import SamplingParams

if TYPE_CHECKING:
    from penstock.engine.bans import WordBans
    from penstock.engine.sampling.occurrences import Occurrences
    from penstock.grammar.guide import Guide
    from penstock.grammar.tokenizer import MaskWords

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would only overflow."""


@dataclass(slots=True)
class SamplerState:
    """The sampler's notes on one sequence, from step to step. Only the sampler reads and writes them."""

    occurrences: Occurrences | None = None


@dataclass(slots=True)
class Choice:
    """One token to choose: the one that follows `tokens` and `drafts`."""

    params: SamplingParams
    stops: frozenset[int]
    tokens: Sequence[int]
    prompt_length: int
    drafts: tuple[int, ...] = ()
    """Proposed tokens that this row assumes to be right."""
    state: SamplerState = field(default_factory=SamplerState)
    """The sampler's notes on the sequence."""
    guide: Guide | None = None
    """The sequence's way through its grammar, if it has one. Its masks know of bans too."""
    legal: MaskWords | None = None
    """Of a guided choice: the tokens that may be chosen."""
    words: WordBans | None = None
    """What the request's bad words ban, `banned_token_ids` included; None: it has none."""
    plain: bool = field(init=False)
    """Whether the choice is greedy, without bias, penalty, early end or logprobs: an argmax (of what is legal, and not
    banned) is enough."""

    def __post_init__(self) -> None:
        params = self.params
        unbanned = params.min_tokens == 0 or not self.stops or self.guide is not None
        unbiased = unbanned and not params.logit_bias and not self.penalised
        twice = self.guide is not None and self.bans
        self.plain = self.greedy and unbiased and params.logprobs is None and not twice

    @property
    def position(self) -> int:
        return len(self.tokens) + len(self.drafts)

    @property
    def generated(self) -> int:
        return self.position - self.prompt_length

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0

    @property
    def bans(self) -> bool:
        """Whether the request bans tokens anywhere."""
        return self.words is not None or bool(self.params.banned_token_ids)

    def banned_after(self, drafts: int) -> frozenset[int]:
        """Tokens that the request bans behind so many of the drafts."""
        if self.words is None:
            return self.params.banned_token_ids
        return self.words.after(self.tokens, self.prompt_length, self.drafts[:drafts])

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that can't be chosen here, unless a grammar allows nothing else."""
        early = self.guide is None and self.generated < self.params.min_tokens
        banned = self.banned_after(len(self.drafts))
        return banned | self.stops if early else banned

    @property
    def bare(self) -> bool:
        """Whether the logits reach the temperature unchanged: without penalty, bias, ban or grammar."""
        return not (self.penalised or self.params.logit_bias or self.banned or self.guide)

    @property
    def unshaped(self) -> bool:
        """Whether nothing changes the logits but what is legal, and nothing but the token is wanted."""
        return self.params.logprobs is None and not (self.penalised or self.params.logit_bias)


class Chosen(msgspec.Struct, frozen=True, gc=False):
    """A sampled token."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    proposer: str | None = None
    """See TokenOut."""
