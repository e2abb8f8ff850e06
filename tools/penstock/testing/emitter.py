"""A mesh that computes nothing: a router and a worker in one servicer, which emits tokens as each request wants them.

What it shall do stands in fields of the request that reach a worker unchanged: `max_tokens` tokens, `seed` microseconds
between two of them (0: as fast as they are taken), none but the first before `top_k` such requests stand. Like an
engine it works in steps: tokens that are due in one step, of all requests, come at its end. A request that wants
logprobs gets the time instead: each token says when it was sent, see `age`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from penstock.engine.hooks import Relay
from penstock.engine.request import TokenOut, Update
from penstock.kv.spec import KvSpec, spec_to_message
from penstock.runtime.drafts import DraftAccount
from penstock.v1 import common_pb2, decode_pb2, decode_pb2_grpc, router_pb2, router_pb2_grpc
from penstock.worker.serving.listening import Listeners, Way, say_told

_CYCLE_S = 64.0
"""Times are told modulo this: a logprob has 24 bits, so 4 us are left."""
_STEP_S = 0.002
"""Length of a step; few engines are as quick."""
_NONE = DraftAccount()
CONTEXT = 1 << 20
BLOCK = 16


def stamp() -> float:
    """Now, as a logprob; of the clock that all processes of a machine share."""
    return -(time.monotonic() % _CYCLE_S)


def age(stamped: float, now: float) -> float:
    """Seconds from a stamp to `now`, a time of `time.monotonic` less than a minute later."""
    return (now + stamped + _CYCLE_S / 2) % _CYCLE_S - _CYCLE_S / 2


async def _paced(indices: Iterable[int], pause_s: float) -> AsyncIterator[int]:
    """The indices, at the end of steps, on average `pause_s` apart."""
    due = time.monotonic()
    for index in indices:
        due += pause_s
        end = math.ceil(due / _STEP_S) * _STEP_S
        if pause_s and (early := end - time.monotonic()) > 0:
            await asyncio.sleep(early)
        yield index


class _Emission:
    """The tokens of one request from the second to the one before the last, as they are taken: a Pending."""

    def __init__(self, says: Sequence[int], last: int, stamped: bool) -> None:
        self.last = last
        self.taken = asyncio.Event()
        self._says = says
        self._stamped = stamped
        self._next = 1
        self._stamps: list[float] = []
        self._emitted = 0
        self._at_once = last

    def emit(self, tokens: int, at_once: int | None = None) -> None:
        """So many tokens more may be taken, `at_once` of them at a time."""
        self._emitted += tokens
        self._at_once = at_once or self._at_once
        if self._stamped:
            self._stamps += [stamp()] * tokens

    @property
    def more(self) -> bool:
        """Whether a token was emitted that was not taken."""
        return self._next <= self._emitted

    def passed(self) -> Update:
        """Takes those that were emitted."""
        first, end = self._next, min(self._emitted, self._next + self._at_once - 1) + 1
        self._next = end
        if end == self.last:
            self.taken.set()
        says, many = self._says, len(self._says)
        stamps: Sequence[float | None] = self._stamps[first - 1 : end - 1] or [None] * (end - first)
        tokens = [TokenOut(at, says[at % many], one) for at, one in zip(range(first, end), stamps, strict=True)]
        return Update(tuple(tokens), None, 0, 0, 0, _NONE, 0, 0.0, 0.0, 0.0, 0.0)


class Emitter(router_pb2_grpc.RouterServicer, decode_pb2_grpc.DecodeServicer):
    """The router, and the one worker that it plans with."""

    def __init__(self, *, model: str, tokenizer: str, says: Sequence[int]) -> None:
        """Serves `model`, whose tokenizer has that digest; every answer is `says`, again and again."""
        self.address = ""
        """Where it is served; set it before the first plan."""
        self._says = says
        self._crowd = 0
        self._gate = asyncio.Event()
        self._listeners = Listeners()
        spec = KvSpec(
            model="e" * 64, tokenizer=tokenizer, layout="none", dtype="float32", block_size=BLOCK, block_bytes=1024
        )
        served = router_pb2.ServedModel(name=model, spec=spec_to_message(spec), max_model_len=CONTEXT, ready=True)
        self._view = router_pb2.MeshView(models=[served])

    async def Join(
        self, request_iterator: AsyncIterator[router_pb2.JoinRequest], context: Any
    ) -> AsyncIterator[router_pb2.JoinResponse]:
        """Nobody joins."""
        return
        yield

    async def Watch(self, request: router_pb2.WatchRequest, context: Any) -> AsyncIterator[router_pb2.MeshView]:
        """The model is served; nothing ever changes."""
        yield self._view
        await asyncio.Event().wait()

    async def Hint(self, request: common_pb2.HintRequest, context: Any) -> common_pb2.HintResponse:
        """Takes note of nothing."""
        return common_pb2.HintResponse()

    async def Members(self, request: router_pb2.MembersRequest, context: Any) -> router_pb2.MembersResponse:
        """It has no members."""
        return router_pb2.MembersResponse()

    async def Command(self, request: router_pb2.CommandRequest, context: Any) -> router_pb2.CommandResponse:
        """Nobody is told anything."""
        return router_pb2.CommandResponse()

    async def Sessions(self, request: router_pb2.SessionsRequest, context: Any) -> router_pb2.SessionsResponse:
        """It remembers none."""
        return router_pb2.SessionsResponse()

    async def Plans(self, request: router_pb2.PlansRequest, context: Any) -> router_pb2.PlansResponse:
        """It remembers none."""
        return router_pb2.PlansResponse()

    async def ChangeAdapter(self, request: router_pb2.AdapterRequest, context: Any) -> router_pb2.AdapterResponse:
        """Nobody drops anything."""
        return router_pb2.AdapterResponse()

    async def Evict(self, request: router_pb2.EvictRequest, context: Any) -> router_pb2.EvictResponse:
        """Nobody drops anything."""
        return router_pb2.EvictResponse()

    async def Plan(
        self, request_iterator: AsyncIterator[router_pb2.PlanRequest], context: Any
    ) -> AsyncIterator[router_pb2.PlanResponse]:
        """The same worker, always."""
        epoch = 0
        async for message in request_iterator:
            if message.HasField("ask"):
                epoch += 1
                place = router_pb2.Placement(member_id="emitter", address=self.address)
                yield router_pb2.PlanResponse(decode=place, epoch=epoch)

    async def Listen(self, request: decode_pb2.ListenRequest, context: Any) -> AsyncIterator[decode_pb2.TokenBatch]:
        """The tokens of the requests that name this listener."""
        with self._listeners.opened(request.listener) as listener:
            async for batch in listener.batches():
                yield batch

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.GenerateEvent]:
        """The tokens of one request."""
        async with (
            self._listeners.way(request.to, partial(say_told, context)) as way,
            aclosing(self._events(request.request, way)) as events,
        ):
            async for event in events:
                if not await way.send(event):
                    yield event

    async def _events(self, asked: common_pb2.Request, way: Way) -> AsyncGenerator[decode_pb2.GenerateEvent, None]:
        sampling = asked.sampling
        stamped, pause_s = sampling.HasField("logprobs"), sampling.seed / 1e6
        given = len(asked.prompt_ids) + len(asked.output_ids)
        yield self._event(0, stamped, sampling.max_tokens, common_pb2.CacheUse(computed=given))
        await self._crowded(sampling.top_k)
        last = sampling.max_tokens - 1
        if (relay := way.relay()) is not None and last > 1:
            await self._relayed(_Emission(self._says, last, stamped), relay, pause_s)
        else:
            async for index in _paced(range(1, last), pause_s):
                yield self._event(index, stamped, sampling.max_tokens)
        if last > 0:
            yield self._event(last, stamped, sampling.max_tokens)

    @staticmethod
    async def _relayed(emission: _Emission, relay: Relay, pause_s: float) -> None:
        """Returns when all but the first and the last token were taken."""
        if not pause_s:
            emission.emit(emission.last - 1, at_once=1)
            relay(emission)
        else:
            async for _ in _paced(range(1, emission.last), pause_s):
                emission.emit(1)
                relay(emission)
        await emission.taken.wait()

    def _event(
        self, index: int, stamped: bool, most: int, cache: common_pb2.CacheUse | None = None
    ) -> decode_pb2.GenerateEvent:
        id = self._says[index % len(self._says)]
        token = common_pb2.Token(index=index, id=id, logprob=stamp() if stamped else None)
        finish = common_pb2.FINISH_LENGTH if index == most - 1 else common_pb2.FINISH_UNSPECIFIED
        return decode_pb2.GenerateEvent(tokens=[token], finish=finish, cache=cache)

    async def _crowded(self, most: int) -> None:
        """Returns when `most` requests have come here."""
        if most <= 1:
            return
        self._crowd += 1
        if self._crowd < most:
            await self._gate.wait()
            return
        self._crowd = 0
        self._gate.set()
        self._gate = asyncio.Event()
