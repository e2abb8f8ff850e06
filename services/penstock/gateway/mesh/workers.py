"""Calls to workers: manages channel, stub, deadline and end of each call."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TypeVar

import grpc

from penstock.errors import DeadlineExceeded
from penstock.gateway.mesh import wire
from penstock.gateway.mesh.faults import blames_member, public_error
from penstock.gateway.mesh.listening import HeardCall, Listening
from penstock.gateway.mesh.view import RouterView
from penstock.gateway.request.work import Assignment, ChoiceRequest, Lost, Placement, Receiver, Stage, workers_failed
from penstock.rpc.channels import Channels
from penstock.rpc.context import TOLD, outgoing
from penstock.rpc.errors import is_raised
from penstock.runtime.tasks import Failed, being_cancelled
from penstock.v1 import decode_pb2_grpc, pictures_pb2, pictures_pb2_grpc, prefill_pb2_grpc

_LAST_WORDS_S = 1.0
"""Most seconds to wait for what a worker sent on the listener before its call failed."""
_CHUNK = 1 << 20
_LINGER_S = 0.25
"""Seconds for which a listener waits for another call. A worker that drains waits for it."""

AnyCall = TypeVar("AnyCall", bound=grpc.aio.Call)
PictureCall = grpc.aio.StreamStreamCall[pictures_pb2.PictureNews, pictures_pb2.PicturesHeld]


class WorkerChannels:
    """Lends channels, and the listener of each, which stays for `_LINGER_S` after its last call. A channel whose peer
    could not be reached is closed when its last user is done: workers come back under other addresses, and gRPC would
    try the old one for ever. Made by `open_worker_channels`."""

    def __init__(self, channels: Channels, failed: Failed) -> None:
        """`failed` counts defects."""
        self._channels = channels
        self._failed = failed
        self._uses: Counter[str] = Counter()
        self._listening: dict[str, Listening] = {}
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        """Listeners that nobody uses."""
        self._unreachable: set[str] = set()

    @asynccontextmanager
    async def at(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """The channel to `address`, for one call."""
        self._uses[address] += 1
        try:
            async with self._channels.lent(address, "worker") as channel:
                yield channel
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._unreachable.add(address)
            raise
        finally:
            self._uses[address] -= 1
            if self._uses[address] == 0:
                del self._uses[address]
                await self._close_unreachable(address)

    @contextmanager
    def listening(self, address: str, channel: grpc.aio.Channel) -> Iterator[Listening]:
        """The listener at `address`, for a call that uses `channel`."""
        if (timer := self._leaving.pop(address, None)) is not None:
            timer.cancel()
        found = self._listening.get(address)
        if found is None or found.ended:
            found = self._listening[address] = Listening(channel, self._failed)
        try:
            yield found
        finally:
            if not found.used and self._listening.get(address) is found:
                self._leaving[address] = asyncio.get_running_loop().call_later(_LINGER_S, self._leave, address)

    def _leave(self, address: str) -> None:
        del self._leaving[address]
        self._listening.pop(address).leave()

    async def _close_unreachable(self, address: str) -> None:
        if address in self._unreachable:
            self._unreachable.discard(address)
            if (timer := self._leaving.get(address)) is not None:  # its stream ends with the channel
                timer.cancel()
                self._leave(address)
            await self._channels.forget(address)

    async def close(self) -> None:
        """Ends all listeners."""
        for timer in self._leaving.values():
            timer.cancel()
        for listening in self._listening.values():
            await listening.close()


@asynccontextmanager
async def open_worker_channels(channels: Channels, failed: Failed) -> AsyncIterator[WorkerChannels]:
    """Worker channels, for the length of the block."""
    lent = WorkerChannels(channels, failed)
    try:
        yield lent
    finally:
        await lent.close()


class _Line:
    """A call to a worker and what goes with it, and their end from outside."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.silent = False
        """The router no longer hears from the worker."""
        self.error: grpc.aio.AioRpcError | None = None
        """What broke the stream that the call's events were on."""
        self._calls: list[grpc.aio.Call] = []
        self._ended = False

    def begin(self, call: AnyCall) -> AnyCall:
        """A call of the line."""
        self._calls.append(call)
        if self._ended:
            call.cancel()
        return call

    def end(self) -> None:
        """Ends its calls."""
        self._ended = True
        for call in self._calls:
            call.cancel()

    def fall_silent(self) -> None:
        """Ends the call because its worker is silent."""
        self.silent = True
        self.end()

    def break_off(self, error: grpc.aio.AioRpcError | None) -> None:
        """Ends the call because the stream of its events broke."""
        self.error = error
        self.end()


class Workers:
    """The workers, for one request.

    Each function is one call, whose reports it gives to `hear`: gains until the call ends well, or a last `Lost`. It
    raises PenstockError when the request itself is refused; being cancelled, it ends the call.
    """

    def __init__(self, channels: WorkerChannels, view: RouterView, remaining: Callable[[], float]) -> None:
        """`remaining` gives the seconds until the request's deadline."""
        self._channels = channels
        self._view = view
        self._remaining = remaining
        self._stalls = 0
        """Calls that got no token for too long: each makes the next ones more patient, or an overloaded mesh would be
        asked for the same again and again."""

    async def prefill(self, request: ChoiceRequest, chosen: Assignment, output: Sequence[int], hear: Receiver) -> None:
        """The token after `output`, from the assignment's prefill worker: one report."""
        place = chosen.prefill
        assert place is not None
        message = wire.prefill_request(request, output, place, chosen)
        async with self._line("prefill", place, hear) as line:
            await self._show(request, line)
            stub = prefill_pb2_grpc.PrefillStub(line.channel)
            call = stub.Prefill(message, timeout=self._remaining(), metadata=outgoing())
            async for event in line.begin(call):
                if (gain := wire.prefill_gain(event)) is not None:
                    hear.report(gain)
                    return
        hear.report(Lost("prefill", place.member, workers_failed()))

    async def decode(self, request: ChoiceRequest, chosen: Assignment, output: Sequence[int], hear: Receiver) -> None:
        """The tokens after `output`, from the assignment's decode worker; those that prefill samples may be missing."""
        place = chosen.decode
        message = wire.generate_request(request, output, chosen)
        async with self._line("decode", place, hear) as line:
            await self._show(request, line)
            with (
                self._channels.listening(place.address, line.channel) as listening,
                listening.call(hear, line.break_off, 2.0**self._stalls) as heard,
                self._counting_stalls(heard),
                self._handing_off(chosen, heard, hear),
            ):
                if not request.yields:  # a line's tokens come a few at a time, and may not come for long
                    message.to.listener, message.to.number = listening.name, heard.number
                stub = decode_pb2_grpc.DecodeStub(line.channel)
                call = stub.Generate(message, timeout=self._remaining(), metadata=outgoing())
                try:
                    async for event in line.begin(call):
                        heard.apart = True
                        hear.report(wire.decode_gain(event))
                except grpc.aio.AioRpcError as error:
                    if blames_member(error):
                        await _last_words(heard, error)
                    raise
                await self._last(heard)

    async def _show(self, request: ChoiceRequest, line: _Line) -> None:
        """Has the worker hold the request's pictures for as long as the line stands; sends those that it lacks."""
        if not request.pictures:
            return
        stub = pictures_pb2_grpc.PicturesStub(line.channel)
        call = line.begin(stub.Hold(timeout=self._remaining(), metadata=outgoing()))
        pictures = wire.pictures_of(request)
        await _write(call, wire.picture_names(request))
        answer = await call.read()
        if not isinstance(answer, pictures_pb2.PicturesHeld) or not answer.wanted:
            return
        for number in answer.wanted:
            pixels = pictures[number].pixels.data.cast("B")
            for at in range(0, len(pixels), _CHUNK):
                await _write(call, pictures_pb2.PictureNews(pixels=bytes(pixels[at : at + _CHUNK])))
        await call.read()

    async def _last(self, heard: HeardCall) -> None:
        """Waits for what a call that has ended well has sent to the listener. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self._remaining()):
                await heard.last()
        except TimeoutError:
            raise DeadlineExceeded("the request took too long", code="timeout") from None

    @contextmanager
    def _handing_off(self, chosen: Assignment, heard: HeardCall, hear: Receiver) -> Iterator[None]:
        """Within the block, reports the prefill worker as lost when it falls silent before decode has its hand-off.
        Prefill's own call may have ended by then, with the first token; decode would wait for the rest for as long as
        their connection stands."""
        place = chosen.prefill
        if place is None:
            yield
            return

        def fall_silent() -> None:
            if not heard.begun:
                hear.report(Lost("prefill", place.member, workers_failed(), silent=True))

        with self._view.heard(place.member, fall_silent):
            yield

    @contextmanager
    def _counting_stalls(self, heard: HeardCall) -> Iterator[None]:
        try:
            yield
        finally:
            self._stalls += heard.stalled

    @asynccontextmanager
    async def _line(self, stage: Stage, place: Placement, hear: Receiver) -> AsyncIterator[_Line]:
        """A line to a worker, for one call within the block. The call's failure is reported as a loss."""
        try:
            async with self._channels.at(place.address) as channel:
                line = _Line(channel)
                try:
                    with self._view.heard(place.member, line.fall_silent):
                        yield line
                except asyncio.CancelledError:
                    if line.error is None or being_cancelled():
                        raise
                    raise line.error from None
                finally:
                    line.end()
        except grpc.aio.AioRpcError as error:
            fault = public_error(error, workers_failed().message)
            if not blames_member(error):
                raise fault from error
        except asyncio.CancelledError:  # also how a call tells that it was torn down under its reader
            if being_cancelled():
                raise
            fault = workers_failed()
        else:
            return
        hear.report(Lost(stage, place.member, fault, line.silent))


async def _write(call: PictureCall, news: pictures_pb2.PictureNews) -> None:
    """Writes; where the call has ended, raises what it ended with, as far as that is told: gRPC says INTERNAL of a
    message that was on its way then."""
    try:
        await call.write(news)
    except asyncio.InvalidStateError:
        await call.read()
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INTERNAL:
            raise
        nothing = grpc.aio.Metadata()
        what = "the worker ended the call while it was shown pictures"
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, what) from error


async def _last_words(heard: HeardCall, error: grpc.aio.AioRpcError) -> None:
    """Waits for the tokens that a worker sent before the call failed, so that nobody computes them again. It says how
    many; one that died could not, and then the listener's stream ends as well."""
    told = next((int(value) for key, value in error.trailing_metadata() or () if key == TOLD), 0)
    with suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORDS_S):
            await (heard.before(told) if is_raised(error) else heard.last())
