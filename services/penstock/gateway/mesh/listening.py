"""The tokens of all calls to one decode worker, in one stream: see `Decode.Listen`.

The stream's reader hands each token to the call's receiver by a plain call: no task of a request wakes for it.

A worker that hangs, or that cannot be reached any more, breaks no connection for a while. It says every second how long
a call may go without a token, by what it expects of its steps; a call that goes without for longer has lost it, and so
have all when nothing comes.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context

import grpc
import structlog

from penstock.gateway.mesh import wire
from penstock.gateway.request.work import Gain, Receiver
from penstock.runtime.tasks import Failed, being_cancelled, end, start
from penstock.v1 import decode_pb2, decode_pb2_grpc

_TURN = 64
"""Tokens that are handed out in one turn of the event loop: others have theirs between."""
_LOOK_S = 0.5
"""Seconds between two looks for calls that get no tokens: a look costs them less than a clock for each token."""
_SILENT_S = 3.0
"""A worker says something every second."""

Broken = Callable[[grpc.aio.AioRpcError | None], object]


class HeardCall:
    """One call that names the listener."""

    def __init__(self, number: int, receiver: Receiver, broken: Broken, patience: float) -> None:
        """It waits `patience` times as long for a token as the worker says."""
        self.number = number
        self.stalled = False
        """It was lost because no token came."""
        self._patience = patience
        self._seen, self._seen_at = 0, 0.0
        """What `_heard` was at a look, and when it was the first to see that."""
        self.apart = False
        """Its events come on its own stream, not on the listener's."""
        self._token, self._report = receiver.token, receiver.report
        self._broken = broken
        self._context = copy_context()  # the request's, for what is logged
        self._heard = 0
        """The index after that of the last token that has come."""
        self._awaited = 0
        """The index that `before` waits for; 0: it does not wait."""
        self._last = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether anything has come for the call."""
        return self.apart or self._heard > 0 or self._last.is_set()

    def token(self, index: int, id: int) -> None:
        """Hands on a token that came for the call."""
        self._token(index, id)
        self._hear(index)

    def report(self, gain: Gain) -> None:
        """Hands on what else came for the call."""
        self._context.run(self._report, gain)
        if gain.tokens:
            self._hear(gain.tokens[-1].index)
        if gain.finish is not None:
            self._last.set()

    def _hear(self, index: int) -> None:
        self._heard = index + 1
        if 0 < self._awaited <= self._heard:
            self._last.set()

    def look(self, now: float, patience_s: float) -> bool:
        """Whether no token has come for too long since the first one."""
        if self._heard != self._seen or not self._heard or patience_s == math.inf:
            self._seen, self._seen_at = self._heard, now
        return not self.apart and not self._last.is_set() and now - self._seen_at > self._patience * patience_s

    async def before(self, told: int) -> None:
        """For a call that has failed: returns when all tokens before the index `told` have come, or are lost."""
        self._awaited = told
        if not self.apart and self._heard < told:
            await self._last.wait()

    async def last(self) -> None:
        """For a call that has ended well: returns when all that it has sent to the listener has come, or is lost."""
        if not self.apart:
            await self._last.wait()

    def over(self) -> None:
        """Nothing more will come from the listener."""
        self._last.set()

    def lose(self, error: grpc.aio.AioRpcError | None) -> None:
        """The listener's stream has broken, and what the call has sent on it is lost."""
        if not self.apart and not self._last.is_set():
            self._broken(error)
        self.over()


class Listening:
    """The stream of one worker. It may end by itself; then it hears nothing more."""

    def __init__(self, channel: grpc.aio.Channel, failed: Failed) -> None:
        """Opens the stream. `failed` counts defects."""
        self.name = secrets.token_hex(16)
        self.ended = False
        self._calls: dict[int, HeardCall] = {}
        self._numbers = itertools.count(1)
        self._stood = False
        """The worker has this listener; calls may use it."""
        self._clock = asyncio.get_running_loop().time
        self._patience_s = 0.0
        """What the worker said last; 0: it says nothing."""
        self._heard_at = self._look_at = 0.0
        """When the last batch came, and when the next look is due."""
        self._timer: asyncio.TimerHandle | None = None
        self._log = structlog.get_logger("penstock.gateway")
        none = Context()  # it works for many requests
        asked = decode_pb2.ListenRequest(listener=self.name)
        self._stream = none.run(decode_pb2_grpc.DecodeStub(channel).Listen, asked)  # now: before the first call
        self._reader = none.run(start, self._read, name="listener", on_failure="log", failed=failed)

    @contextmanager
    def call(self, receiver: Receiver, broken: Broken, patience: float = 1.0) -> Iterator[HeardCall]:
        """A call that names this listener, for the length of the block. `broken` is called when the stream breaks with
        events of the call on it, or brings none for too long; its argument is the error, if there was one. `patience`:
        how many times as long as others the call waits for its next token."""
        call = HeardCall(next(self._numbers), receiver, broken, patience)
        self._calls[call.number] = call
        if self.ended:
            call.over()
        try:
            yield call
        finally:
            del self._calls[call.number]

    @property
    def used(self) -> bool:
        """Whether a call names it."""
        return bool(self._calls)

    def leave(self) -> None:
        """Ends the stream; its reader ends soon."""
        self._stream.cancel()

    async def close(self) -> None:
        """Ends the stream and its reader."""
        self._stream.cancel()
        await end(self._reader)

    async def _read(self) -> None:
        error: grpc.aio.AioRpcError | None = None
        try:
            async for batch in self._stream:
                self._stood = True  # the first one has no events, and says so
                self._heard_at = self._clock()
                if batch.patience_s:
                    self._begin_looking(batch.patience_s)
                await self._hand_out(batch)
        except grpc.aio.AioRpcError as caught:
            error = caught
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                self._log.warning("the stream of a worker's tokens broke", calls=len(self._calls), code=error.code())
        except asyncio.CancelledError:  # also how a stream tells that it was torn down under its reader
            if being_cancelled():
                raise
        finally:
            self._stream.cancel()
            self.ended = True
            if self._timer is not None:
                self._timer.cancel()
            for call in list(self._calls.values()):
                if self._stood:
                    call.lose(error)
                else:
                    call.over()

    def _begin_looking(self, patience_s: float) -> None:
        if not self._patience_s:
            self._look_later()
        self._patience_s = patience_s

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._look_at = loop.time() + _LOOK_S
        self._timer = loop.call_at(self._look_at, self._look)

    def _look(self) -> None:
        """Gives up calls that get no tokens, or all of them. What comes while this process is away itself waits to be
        read: after that, everything gets its time anew."""
        now = self._clock()
        away = now - self._look_at > _LOOK_S
        if away:
            self._heard_at = now
        if now - self._heard_at > _SILENT_S:
            self._log.warning("a worker's tokens do not come any more", calls=len(self._calls))
            self._stream.cancel()
            return
        for call in list(self._calls.values()):
            if call.look(now, math.inf if away else self._patience_s):
                self._log.warning("no token comes for a call", patience_s=self._patience_s)
                call.stalled = True
                call.lose(None)
        self._look_later()

    async def _hand_out(self, batch: decode_pb2.TokenBatch) -> None:
        tokens = list(zip(batch.calls, batch.indices, batch.ids, strict=True))
        self._give(tokens[:_TURN])
        for first in range(_TURN, len(tokens), _TURN):
            await asyncio.sleep(0)
            self._give(tokens[first : first + _TURN])
        for counts in batch.drafts:
            self._report(counts.call, wire.drafts_gain(counts))
        for sent in batch.events:
            self._report(sent.call, wire.decode_gain(sent.event))

    def _give(self, tokens: Sequence[tuple[int, int, int]]) -> None:
        calls = self._calls
        for number, index, id in tokens:
            call = calls.get(number)  # one that has left may still be sent tokens
            if call is not None:
                call.token(index, id)

    def _report(self, number: int, gain: Gain) -> None:
        call = self._calls.get(number)
        if call is not None:
            call.report(gain)
