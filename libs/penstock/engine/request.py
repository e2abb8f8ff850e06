"""Requests to the engine and its answers. Plain values, importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from penstock.pictures.picture import ShownPicture
from penstock.runtime.drafts import DraftAccount

FinishReason = Literal["stop", "length"]
"""stop: an end or stop token was sampled (it is the last token). length: max_tokens or the context is used up."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. `engine.sampler` defines the order in which the fields act.

    The noise is a function of (seed, position in prompt + output) alone, so a request that is continued elsewhere
    draws the same tokens. `logprobs` are those of the model, before bias, penalties and temperature.
    """

    max_tokens: int
    """Counts every generated token of the request, `Request.output` included."""
    min_tokens: int = 0
    """End and stop tokens cannot be sampled before this many tokens."""
    temperature: float = 1.0
    """0 is greedy; equal logits go to the lowest id."""
    top_k: int = 0
    """0 is off. Tokens that tie with the k-th stay."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of every token of prompt and output."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token of the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    """Taken modulo 2**64."""
    logprobs: int | None = None
    """None: no logprobs. n: the chosen token's and the n most probable tokens'."""
    stop_token_ids: frozenset[int] = frozenset()
    """Besides the model's own end tokens."""
    ignore_eos: bool = False
    """The model's end tokens are ordinary tokens."""
    banned_token_ids: frozenset[int] = frozenset()
    """These cannot be sampled, unless the grammar allows nothing else."""
    bad_words: tuple[str, ...] = ()
    """The output's text has none of these as a word of its own, unless the grammar allows nothing else. Of the prompt
    nothing counts. See `penstock.grammar.joining` for what a word of its own is."""
    grammar: str = ""
    """llguidance's JSON form: the output is a text of this grammar, or the beginning of one where `max_tokens` cuts it.
    Empty: any text. When the text is complete only an end token is possible, whatever `min_tokens` and `ignore_eos`
    say; where it may end or go on, they hold."""
    drafts: bool = True
    """False: no tokens are drafted for it, and none are guessed from its text."""
    proposers: bool = False
    """Its tokens say who proposed them."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue."""

    id: str
    """Unique among the requests that are live in one engine."""
    prompt: tuple[int, ...]
    sampling: SamplingParams
    output: tuple[int, ...] = ()
    """Tokens that were generated and emitted before, by this or another worker; new indices continue after them."""
    owner: bytes = b""
    """Whose it is: the namespace of a tenant. Its priority counts beside others of the same owner only, and its tokens
    are guessed from texts of the same owner only."""
    session: bytes = b""
    """Names the conversation that it belongs to, beside others of the same owner; empty: unknown."""
    seal: bytes = field(default=b"", repr=False)
    """What whoever keeps blocks of the owner seals them with; empty: nothing."""
    adapter: str = ""
    """The fingerprint of the adapter that is added to the model; empty: none."""
    priority: int = 0
    """Seconds by which it is later in line than it came, or earlier. Lower is earlier."""
    yields: bool = False
    """It gets only what requests that do not yield leave of each step, and gives way to them at once."""
    pictures: tuple[ShownPicture, ...] = ()
    """In the prompt, in order."""
    resumed: bool = False
    """It was being generated when something failed. It comes before prompts of all owners, as its next token would
    have."""


class TokenOut(msgspec.Struct, frozen=True, gc=False):
    """One generated token."""

    index: int
    """From 0 at the request's first generated token; `Request.output` counts."""
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob), most probable first."""
    proposer: str | None = None
    """Whose draft it was, of `penstock.runtime.drafts.PROPOSERS`; empty: nobody's; None: the request doesn't ask."""


class Update(msgspec.Struct, frozen=True, gc=False):
    """New tokens since the last update, and running totals. The last update carries `finish`.

    cached_tokens + shared_tokens + computed_tokens = len(prompt + output as given) once the first token is there.
    """

    tokens: tuple[TokenOut, ...]
    finish: FinishReason | None
    cached_tokens: int
    """Leading tokens whose KV came through the source; its own count if it gives one."""
    shared_tokens: int
    """Given tokens whose KV was in this engine's pages already, from another request, when they were to be computed."""
    computed_tokens: int
    """Given tokens whose KV this engine's steps computed (recomputation after preemption not counted again)."""
    drafts: DraftAccount
    """The request's own, which goes on counting."""
    preemptions: int
    load_s: float
    """Seconds in the source."""
    queue_s: float
    """Seconds from the end of loading to the first step."""
    prefill_s: float
    """Seconds from the first step to the first token."""
    decode_s: float
    """Seconds from the first token to the latest."""
