"""The tokens of one request that wait for its reader."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from penstock.engine.delivery.sinks import SinkFeed
from penstock.engine.hooks import Relay
from penstock.engine.request import FinishReason, TokenOut, Update
from penstock.engine.sampling.choice import Chosen
from penstock.engine.scheduling.live import Live
from penstock.runtime.drafts import DraftAccount

_AT_ONCE = 64
"""Tokens that wait for each other where a request yields: nobody reads such an answer as it comes, and to tell of a
token costs about as much as to compute it with a small model."""
_MOST = 1024
"""Tokens of one update, so that it fits into a message with its logprobs."""


@dataclass(slots=True)
class Timeline:
    """Moments of a request, in seconds of the monotonic clock (None until they occur), and the times between them."""

    submitted: float
    loaded: float | None = None
    started: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    load_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0

    def load_over(self, now: float) -> None:
        """Notes the end of loading; the sequence enters the line. What is loaded after that is part of its wait."""
        if self.loaded is None:
            self.loaded, self.load_s = now, now - self.submitted

    def step_begins(self, now: float) -> None:
        """Notes the beginning of the first step; later ones change nothing."""
        if self.started is None:
            assert self.loaded is not None
            self.started, self.queue_s = now, now - self.loaded

    def first(self, now: float) -> None:
        """Notes the first token."""
        assert self.started is not None
        self.first_token, self.prefill_s = now, now - self.started


class Outlet:
    """The reader's end of one request. Tokens that the reader has not taken yet are merged, so nothing queues up."""

    def __init__(self, live: Live, feed: SinkFeed | None, drafts: DraftAccount) -> None:
        """`feed` feeds the request's sink, if it has one."""
        self.live = live
        self.feed = feed
        self.timeline = Timeline(time.monotonic())
        self.finish: FinishReason | None = None
        self.error: Exception | None = None
        self._chosen: list[Chosen] = []
        self._first = self._index = 0
        """Index of the first token of all, and of `_chosen`, among the generated tokens."""
        self._drafts = drafts
        self._reader: asyncio.Future[None] | None = None
        self._relay: Relay | None = None

    def enter(self) -> None:
        """The sequence is in the line, with all the output that was given to it."""
        self._first = self._index = self.live.generated
        self.timeline.load_over(time.monotonic())

    def add(self, answer: list[Chosen], now: float) -> None:
        """Tokens that a step gave at `now`; the reader hears of them by `tell`. The outlet owns the list now."""
        if self._chosen:
            self._chosen += answer
        else:
            self._chosen = answer
        times = self.timeline
        if times.first_token is None:
            times.first(now)
        times.last_token = now

    def fail(self, error: Exception) -> None:
        """Makes the reader get `error` after the tokens that are pending."""
        self.error = error
        self.wake()

    def tell(self) -> None:
        """Lets sink and reader, or its relay, know of the last step; not a reader that has left."""
        if self.feed is not None and not self.live.gone:
            self.feed.report()
        if not self._chosen or self._rests or (self.live.gone and not self._over):
            return
        if self._relay is not None and not self._over:
            self._relay(self)
        else:
            self.wake()

    @property
    def _rests(self) -> bool:
        """Whether the reader hears of its tokens later, after the first."""
        begun = self._index > self._first
        return self.live.request.yields and begun and len(self._chosen) < _AT_ONCE and not self._over

    def wake(self) -> None:
        """Wakes the reader if it waits."""
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    @property
    def empty(self) -> bool:
        """Whether the reader would have to wait: no tokens, no end and no error are pending."""
        return not (self._chosen or self.finish or self.error)

    def news(self) -> asyncio.Future[None]:
        """For the reader of an empty outlet: done when there is something to take."""
        self._reader = asyncio.get_running_loop().create_future()
        return self._reader

    async def end(self, relay: Relay) -> None:
        """For the reader: returns when the request has ended. Until then its tokens are left to `relay`."""
        self._relay = relay
        if self.more:
            relay(self)
        while not self._over:
            await self.news()

    @property
    def _over(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def more(self) -> bool:
        """Whether tokens are pending, and neither an end nor an error: then they are the reader's."""
        return bool(self._chosen) and self.finish is None and self.error is None

    def passed(self) -> Update:
        """For the relay, while there is `more`."""
        return self.take()

    def take(self) -> Update:
        """For the reader: what is new since the last call, up to a bound; the end comes with the last token. Raises the
        error once all tokens are taken."""
        if self.error is not None and not self._chosen:
            raise self.error
        live, times, drafts = self.live, self.timeline, self._drafts
        return Update(
            self._tokens(),
            None if self._chosen else self.finish,
            live.cached_tokens,
            live.shared_tokens,
            live.computed_tokens,
            drafts,
            live.preemptions,
            times.load_s,
            times.queue_s,
            times.prefill_s,
            0.0 if times.first_token is None else times.last_token - times.first_token,
        )

    def _tokens(self) -> tuple[TokenOut, ...]:
        chosen, first = self._chosen, self._index
        rest: list[Chosen] = []
        if len(chosen) > _MOST:
            chosen, rest = chosen[:_MOST], chosen[_MOST:]
        self._chosen, self._index = rest, first + len(chosen)
        if len(chosen) == 1:  # nearly always
            [one] = chosen
            return (TokenOut(first, one.token, one.logprob, one.top, one.proposer),)
        return tuple(
            [TokenOut(at, one.token, one.logprob, one.top, one.proposer) for at, one in enumerate(chosen, first)]
        )
