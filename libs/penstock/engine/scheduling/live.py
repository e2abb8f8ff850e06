"""One request while the engine has it: its tokens, its pages, and the slot its reader takes news from."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.engine.hooks import KvSink, KvSource
from penstock.engine.request import FinishReason, Request, SamplingParams, TokenOut
from penstock.engine.speculation.appetite import Appetite

if TYPE_CHECKING:
    from penstock.engine.forward.batch import Run


@dataclass(slots=True)
class Timeline:
    """Moments on the engine's clock, in seconds, None while they have not come yet, and the times between them."""

    submitted: float
    loaded: float | None = None
    started: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    load_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0

    def load_over(self, now: float) -> None:
        self.loaded, self.load_s = now, now - self.submitted

    def step_begins(self, now: float) -> None:
        """The first one."""
        assert self.loaded is not None
        self.started, self.queue_s = now, now - self.loaded

    def first(self, now: float) -> None:
        """A token is there."""
        assert self.started is not None
        self.first_token, self.prefill_s = now, now - self.started


class Slot:
    """Where tokens wait for their reader. Whatever the reader has not taken is merged, so nothing queues up."""

    def __init__(self) -> None:
        self.tokens: list[TokenOut] = []
        self.finish: FinishReason | None = None
        self.error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def fail(self, error: Exception) -> None:
        self.error = error
        self.wake()

    def wake(self) -> None:
        """Tells the reader, if it waits, of what was put into the fields."""
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def news(self) -> asyncio.Future[None]:
        """For the reader: done at the next `wake`. Only to be awaited while there is nothing to take."""
        self._reader = asyncio.get_running_loop().create_future()
        return self._reader

    def take(self) -> tuple[TokenOut, ...]:
        """For the reader: the tokens since the last call. Raises the error when the last token is taken."""
        if self.error is not None and not self.tokens:
            raise self.error
        tokens, self.tokens = tuple(self.tokens), []
        return tokens


@dataclass(eq=False, slots=True)
class Live:
    """Mutable state of one request. The event loop owns it; a running step only reads it."""

    request: Request
    ticket: int
    """Order of arrival, unique in the engine."""
    stops: frozenset[int]
    """Tokens that end the sequence."""
    source: KvSource | None
    sink: KvSink | None
    slot: Slot
    timeline: Timeline
    tokens: list[int]
    """Prompt and output. Only ever grows."""
    given: int
    """How many of them came with the request."""
    ends_at: int
    """Tokens with which `max_tokens` is used up."""
    computed: int = 0
    """Leading tokens whose KV is in `pages`."""
    pages: list[int] = field(default_factory=list)
    version: int = 0
    """Changes whenever `pages` changes."""
    reported: int = 0
    """Leading blocks the sink knows of or a source loaded."""
    loaded: int = 0
    """Leading given tokens that a source provided and that were used."""
    reached: int = 0
    """The most given tokens that were ever computed or loaded."""
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Given tokens that steps computed, those computed again after a preemption counted once."""
    stripped: bool = False
    """Its loaded pages were taken away."""
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    appetite: Appetite = field(default_factory=Appetite)
    busy: bool = False
    """A step is reading its tokens and pages."""
    gone: bool = False
    """Finished, failed or dropped: no more news, pages go as soon as nothing uses them."""
    memory: dict[str, Any] = field(default_factory=dict)
    """The sampler's running counts; touched by steps only."""
    run: Run = field(init=False)
    """What it puts in a step, made once by the engine and aimed anew before each."""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def owner(self) -> str:
        """Its name in the page pool."""
        return f"{self.request.id}#{self.ticket}"

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is not there yet; 1 is a decode step."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Output tokens, those of `Request.output` included."""
        return len(self.tokens) - len(self.request.prompt)

    def forget_loaded(self) -> None:
        """What a source loaded was lost before it was of use; what it loads from now on will not be used."""
        self.loaded = self.reached = self.cached_tokens = 0
        self.stripped = True

    def verdict(self, limit: int) -> FinishReason | None:
        """Whether its last token ended it; `limit` is the most tokens a sequence may have."""
        if self.generated == 0:
            return None
        if self.tokens[-1] in self.stops and self.generated > self.sampling.min_tokens:
            return "stop"
        if self.length >= self.ends_at or self.length >= limit:
            return "length"
        return None


def new_live(
    request: Request,
    ticket: int,
    eos: frozenset[int],
    source: KvSource | None,
    sink: KvSink | None,
    now: float,
) -> Live:
    """A sequence at the start of its life; `eos` are the model's end tokens."""
    sampling = request.sampling
    return Live(
        request=request,
        ticket=ticket,
        stops=sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos),
        source=source,
        sink=sink,
        slot=Slot(),
        timeline=Timeline(submitted=now),
        tokens=[*request.prompt, *request.output],
        given=len(request.prompt) + len(request.output),
        ends_at=len(request.prompt) + sampling.max_tokens,
    )
