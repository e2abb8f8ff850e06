"""A mesh that computes nothing: a router and a worker in one servicer, which emits tokens as each request wants them.

What it shall do stands in fields of the request that reach a worker unchanged: `max_tokens` tokens, `seed` microseconds
between two of them (0: as fast as they are taken), none but the first before `top_k` such requests stand. A request
that wants logprobs gets the time instead: each token says when it was sent, see `age`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from penstock.kv.spec import KvSpec, spec_to_message
from penstock.v1 import common_pb2, decode_pb2, decode_pb2_grpc, router_pb2, router_pb2_grpc

_CYCLE_S = 64.0
"""Times are told modulo this: a logprob has 24 bits, so 4 us are left."""
CONTEXT = 1 << 20
BLOCK = 16


def stamp() -> float:
    """Now, as a logprob; of the clock that all processes of a machine share."""
    return -(time.monotonic() % _CYCLE_S)


def age(stamped: float, now: float) -> float:
    """Seconds from a stamp to `now`, a time of `time.monotonic` less than a minute later."""
    return (now + stamped + _CYCLE_S / 2) % _CYCLE_S - _CYCLE_S / 2


class Emitter(router_pb2_grpc.RouterServicer, decode_pb2_grpc.DecodeServicer):
    """The router, and the one worker that it plans with."""

    def __init__(self, *, model: str, tokenizer: str, says: Sequence[int]) -> None:
        """Serves `model`, whose tokenizer has that digest; every answer is `says`, again and again."""
        self.address = ""
        """Where it is served; set it before the first plan."""
        self._says = says
        self._crowd = 0
        self._gate = asyncio.Event()
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

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.GenerateEvent]:
        """The tokens of one request."""
        asked, sampling = request.request, request.request.sampling
        stamped, pause_s = sampling.HasField("logprobs"), sampling.seed / 1e6
        given = len(asked.prompt_ids) + len(asked.output_ids)
        yield self._event(0, stamped, sampling.max_tokens, common_pb2.CacheUse(computed=given))
        await self._crowded(sampling.top_k)
        due = time.monotonic()
        for index in range(1, sampling.max_tokens):
            due += pause_s
            if pause_s and (early := due - time.monotonic()) > 0:
                await asyncio.sleep(early)
            yield self._event(index, stamped, sampling.max_tokens)

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
