"""Listeners: the tokens of many calls of one gateway in one stream.

A message costs both sides about as much as all the tokens in it. So tokens of calls that a gateway has here wait for
each other, but no longer than the write before them takes.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from penstock.engine.hooks import Pending, Relay
from penstock.engine.request import Update
from penstock.errors import InvalidRequest, Unavailable
from penstock.rpc.bounds import bad, check_id
from penstock.rpc.context import TOLD
from penstock.runtime.drafts import DraftAccount
from penstock.v1 import decode_pb2
from penstock.worker.convert import drafts_to_message, token_to_message

_MOST_TOKENS = 2048
"""Tokens of one batch, give or take the last of its updates."""
_BEAT_S = 1.0
"""A gateway hears at least so often how long its calls may go without a token."""


@dataclass(slots=True)
class _Posted:
    """An event on its way."""

    event: decode_pb2.CallEvent
    sent: asyncio.Event = field(default_factory=asyncio.Event)


class Listener:
    """One stream to a gateway. It has one batch in flight; what is not in it stays with the engine, one entry a call:
    a slow reader costs no memory here."""

    def __init__(self, passed: Callable[[int], object], patience: Callable[[], float]) -> None:
        """`passed` hears of the number of tokens that it took from the engine, of each call. `patience` says for how
        many seconds a call may go without a token."""
        self._passed = passed
        self._patience = patience
        self._clock = asyncio.get_running_loop().time
        self._said_at = -math.inf
        """When the gateway was last told of that."""
        self._ready: dict[int, Pending] = {}
        """The calls that have tokens."""
        self._posted: deque[_Posted] = deque()
        self._told: dict[int, int] = {}
        """The index after that of the last token that is in a batch, of each call."""
        self._passes: dict[int, int] = {}
        """The count that the gateway has, of calls with drafts."""
        self._calls: dict[int, asyncio.Timeout] = {}
        """The blocks of calls, which end with this listener."""
        self._news = asyncio.Event()

    @asynccontextmanager
    async def call(self, number: int) -> AsyncIterator[None]:
        """A call sends here for the length of the block, which is left with Unavailable when the stream breaks. Raises
        InvalidRequest for a number in use."""
        if number in self._calls:
            raise bad("to.number", str(number), "must be that of no other call")
        try:
            async with asyncio.timeout(None) as block:
                self._calls[number] = block
                yield
        except TimeoutError:
            if not block.expired():
                raise
            raise Unavailable("the listener has gone") from None
        finally:
            del self._calls[number]
            for of_calls in (self._ready, self._told, self._passes):
                of_calls.pop(number, None)

    def told(self, number: int) -> int:
        """The index after that of the call's last token that was sent; 0: none was."""
        return self._told.get(number, 0)

    def ready(self, number: int, pending: Pending) -> None:
        """The call has tokens."""
        self._ready[number] = pending
        self._news.set()

    async def send(self, number: int, event: decode_pb2.GenerateEvent) -> None:
        """Sends an event; returns when it was written."""
        posted = _Posted(decode_pb2.CallEvent(call=number, event=event))
        self._posted.append(posted)
        self._news.set()
        await posted.sent.wait()

    async def batches(self) -> AsyncIterator[decode_pb2.TokenBatch]:
        """What is ready, whenever the reader has taken the batch before; never ends. The first batch has no events: it
        says that the listener stands."""
        batch = decode_pb2.TokenBatch()
        self._say_patience(batch)
        yield batch
        while True:
            await self._news_or_beat()
            self._news.clear()
            batch = decode_pb2.TokenBatch()
            self._say_patience(batch)
            written, room = self._add_posted(batch, _MOST_TOKENS)
            self._add_tokens(batch, room)
            if self._posted or self._ready:
                self._news.set()
            if batch.calls or batch.events or batch.patience_s:
                yield batch
            for posted in written:
                posted.sent.set()

    async def _news_or_beat(self) -> None:
        """Returns when there is something to send, or `_BEAT_S` have passed."""
        if not self._news.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S):
                    await self._news.wait()

    def _say_patience(self, batch: decode_pb2.TokenBatch) -> None:
        now = self._clock()
        if now - self._said_at >= _BEAT_S:
            self._said_at, batch.patience_s = now, self._patience()

    def close(self) -> None:
        """Ends the calls that send here."""
        now = asyncio.get_running_loop().time()
        for block in self._calls.values():
            block.reschedule(now)

    def _add_posted(self, batch: decode_pb2.TokenBatch, room: int) -> tuple[list[_Posted], int]:
        """The events that are now in the batch, and for how many tokens it still has room."""
        added: list[_Posted] = []
        while self._posted and room > 0:
            posted = self._posted.popleft()
            if posted.event.call in self._calls:
                batch.events.append(posted.event)
                added.append(posted)
                if tokens := posted.event.event.tokens:
                    self._told[posted.event.call] = tokens[-1].index + 1
                    room -= len(tokens)
        return added, room

    def _add_tokens(self, batch: decode_pb2.TokenBatch, room: int) -> None:
        """Fills the room; calls that get none, or have more, come first next time, in this order."""
        ready = self._ready
        more: dict[int, Pending] = {}
        calls: list[int] = []
        indices: list[int] = []
        ids: list[int] = []
        while ready and room > 0:
            number = next(iter(ready))
            pending = ready.pop(number)
            if not pending.more:
                continue
            update = pending.passed()
            room -= len(update.tokens)
            self._passed(len(update.tokens))
            self._told[number] = update.tokens[-1].index + 1
            if update.tokens[0].logprob is None and update.tokens[-1].proposer is None:
                for token in update.tokens:
                    calls.append(number)
                    indices.append(token.index)
                    ids.append(token.token)
                self._add_drafts(batch, number, update.drafts)
            else:
                _add_event(batch, number, update)
            if pending.more:
                more[number] = pending
        ready |= more
        batch.calls.extend(calls)
        batch.indices.extend(indices)
        batch.ids.extend(ids)

    def _add_drafts(self, batch: decode_pb2.TokenBatch, number: int, drafts: DraftAccount) -> None:
        if self._passes.get(number, 0) != drafts.passes:
            self._passes[number] = drafts.passes
            batch.drafts.add(call=number, drafts=drafts_to_message(drafts))


def _add_event(batch: decode_pb2.TokenBatch, number: int, update: Update) -> None:
    tokens = [token_to_message(token) for token in update.tokens]
    event = decode_pb2.GenerateEvent(tokens=tokens, drafts=drafts_to_message(update.drafts))
    batch.events.append(decode_pb2.CallEvent(call=number, event=event))


def say_told(context: grpc.aio.ServicerContext[Any, Any], told: int) -> None:
    """Says in the trailers of a call what its listener was sent."""
    context.set_trailing_metadata(((TOLD, str(told)),))


class Listeners:
    """All listeners of a worker."""

    def __init__(
        self,
        passed: Callable[[int], object] = lambda _tokens: None,
        patience: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """See Listener."""
        self._passed = passed
        self._patience = patience
        self._open: dict[str, Listener] = {}

    @contextmanager
    def opened(self, name: str) -> Iterator[Listener]:
        """A listener of that name, for the length of the block. Raises InvalidRequest."""
        check_id("listener", name)
        if name in self._open:
            raise InvalidRequest(f"listener = {name!r}: another stream has this name", field="listener")
        listener = self._open[name] = Listener(self._passed, self._patience)
        try:
            yield listener
        finally:
            del self._open[name]
            listener.close()

    @asynccontextmanager
    async def way(
        self, to: decode_pb2.Destination, failed: Callable[[int], object] = lambda _told: None
    ) -> AsyncIterator[Way]:
        """The way of one call, for the length of the block, which is left with Unavailable when it led to a listener
        whose stream broke. `failed` hears what `Way.told` is when the block is left with an error."""
        async with AsyncExitStack() as stack:
            way = Way(self, to, stack)
            try:
                yield way
            except Exception:
                failed(way.told)
                raise

    def named(self, name: str) -> Listener | None:
        """The listener of that name, if it is there."""
        return self._open.get(name)


class Way:
    """Where the events of one call go: to its listener, if there is one when the first event is ready, else to the
    call's own stream. Made by `Listeners.way`."""

    def __init__(self, listeners: Listeners, to: decode_pb2.Destination, stack: AsyncExitStack) -> None:
        self._listeners = listeners
        self._to = to
        self._stack = stack
        self._chosen = False
        self._listener: Listener | None = None

    async def send(self, event: decode_pb2.GenerateEvent) -> bool:
        """Sends an event, and returns when it was written; False when it belongs on the call's own stream. Tokens
        relayed before are sent before."""
        if not self._chosen:
            self._chosen = True
            self._listener = self._listeners.named(self._to.listener)
            if self._listener is not None:
                await self._stack.enter_async_context(self._listener.call(self._to.number))
        if self._listener is not None:
            await self._listener.send(self._to.number, event)
        return self._listener is not None

    @property
    def told(self) -> int:
        """The index after that of the last token that the listener was sent; 0: none was."""
        return 0 if self._listener is None else self._listener.told(self._to.number)

    def relay(self) -> Relay | None:
        """After the first event: what takes the tokens that need no event of their own."""
        return None if self._listener is None else partial(self._listener.ready, self._to.number)
