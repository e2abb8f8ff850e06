"""One typed request, shared by HTTP and gRPC. The client's body itself is not used beyond this point."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from penstock.chat.messages import PLAIN, Message, Rendering, Tool
from penstock.errors import InvalidRequest, Unprocessable
from penstock.gateway.request import bounds
from penstock.gateway.request.bounds import check, check_count, check_texts
from penstock.gateway.request.calling import Calling
from penstock.grammar.recipe import Part
from penstock.kv.hint import ReturnHint


@dataclass(frozen=True, slots=True)
class Sampling:
    """The client's sampling parameters; None where the client left the choice to the gateway."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    banned_token_ids: Collection[int] = ()
    """Tokens that are not generated, unless a grammar allows nothing else."""
    bad_words: Sequence[str] = ()
    """Texts that an answer does not have as words of their own, unless a grammar allows nothing else."""
    grammar: str = ""
    """llguidance's JSON form: the answer is a text of this grammar. Empty: any text."""
    drafts: bool = True
    """False: it is decoded token by token."""
    proposers: bool = False
    """The client is told of each token whose draft it was."""

    @property
    def tokens_alone(self) -> bool:
        """The client is told nothing of a token but what it is."""
        return self.logprobs is None and not self.proposers

    def check(self, max_tokens_field: str = "max_tokens") -> None:
        """Raises InvalidRequest naming the field that is out of bounds."""
        check("max_tokens", self.max_tokens, max_tokens_field)
        for name in ("min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"):
            check(name, getattr(self, name))
        check("frequency_penalty", self.frequency_penalty)
        check("seed", self.seed)
        check_count("logit_bias", len(self.logit_bias), bounds.MAX_LOGIT_BIAS)
        for token, bias in self.logit_bias.items():
            check("logit_bias", bias, f"logit_bias.{token}")
        check_count("stop_token_ids", len(self.stop_token_ids), bounds.MAX_STOP_TOKENS)
        check_texts("bad_words", self.bad_words, bounds.MAX_BAD_WORDS)
        if sum(map(len, self.bad_words)) > bounds.MAX_BAD_CHARACTERS:
            what = f"bad_words: the strings must have at most {bounds.MAX_BAD_CHARACTERS} characters together"
            raise InvalidRequest(what, field="bad_words")
        if not all(map(str.strip, self.bad_words)):
            raise InvalidRequest("bad_words: each string must have more than white space", field="bad_words")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise Unprocessable(f"min_tokens: must not be more than {max_tokens_field}", field="min_tokens")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises Unprocessable for token ids that the model does not have."""
        for token in self.logit_bias:
            check_token(token, vocab_size, "logit_bias")
        for token in self.stop_token_ids:
            check_token(token, vocab_size, "stop_token_ids")

    def first_seed(self) -> int:
        """The seed of choice 0; drawn when the client gave none. Clients are told, whose JSON may hold only integers
        of 53 bits."""
        return secrets.randbits(53) if self.seed is None else self.seed


@dataclass(frozen=True, slots=True)
class Keep:
    """A wish: keep the KV of the conversation up to here."""

    seconds: float
    upto: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt made of messages."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    """Shown to the model."""
    calling: Calling | None = None
    """What the answer may call; None: it may hold no calls."""
    keeps: Sequence[Keep] = ()
    rendering: Rendering = PLAIN
    shorten: bool = False
    """Whether old messages are left out when it is too long."""
    field: str = "messages"
    """Its name in the client's API, for error messages."""


Prompt = Conversation | str | Sequence[int]
"""Messages, raw text, or token ids."""


@dataclass(frozen=True, slots=True)
class Urgency:
    """When the answers of a request are wanted."""

    priority: int = 0
    """Beside others of its tenant: seconds later in line, or earlier."""
    ttft_s: float = inf
    """From its arrival to the first token, at most."""
    itl_s: float = inf
    """From each token to the next, at most."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A client's request for answers, checked as far as possible without the model."""

    model: str
    prompts: Sequence[Prompt]
    sampling: Sampling
    constraint: Part | None = None
    """What each answer must be; None: any text."""
    keep_last: int | None = None
    """Tokens that are kept of each prompt, from its end; -1: as many as leave room for the answer; None: all."""
    stops: Sequence[str] = ()
    show_stop: bool = False
    """Whether the stop string that ends an answer is shown."""
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    chat: bool = True
    """Whether the client asked the chat endpoint; otherwise the completion endpoint."""
    cache_key: str | None = None
    """The client's own session key."""
    retain_s: float = 0.0
    """Seconds to keep the whole prompt and the answer; 0: the client did not ask for it."""
    outlook: ReturnHint = field(default_factory=ReturnHint)
    urgency: Urgency = field(default_factory=Urgency)
    max_tokens_field: str = "max_tokens"
    """Name of the limit of generated tokens in the client's API, for error messages."""
    stops_field: str = "stop"
    """Name of the stop strings in the client's API, for error messages."""
    prompts_field: str = "prompt"
    """Name of the prompts that are texts or token ids in the client's API, for error messages."""

    def check(self, max_choices: int) -> None:
        """Raises InvalidRequest naming the field that is out of bounds."""
        self.sampling.check(self.max_tokens_field)
        check("n", self.n)
        check("truncate_prompt_tokens", self.keep_last)
        if self.keep_last == 0:
            what = "truncate_prompt_tokens: must be 1 or more, or -1"
            raise InvalidRequest(what, field="truncate_prompt_tokens")
        if self.n * len(self.prompts) > max_choices:
            raise InvalidRequest(f"n: must make at most {max_choices} choices, over all prompts", field="n")
        check_texts(self.stops_field, self.stops, bounds.MAX_STOPS)


def check_token(token: int, vocab_size: int, field: str) -> None:
    """Raises Unprocessable for an id outside of the model's vocabulary."""
    if not 0 <= token < vocab_size:
        raise Unprocessable(f"{field}: the model has no token {token}", field=field)
