"""The Prefill servicer: translates messages and delegates to the engine, the store and the hand-offs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import grpc
import xxhash

from penstock.errors import Unavailable
from penstock.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from penstock.worker.convert import (
    cache_to_message,
    finish_to_message,
    order_from_message,
    retained_to_message,
    times_to_message,
    token_to_message,
)
from penstock.worker.serving.offering import HandoffEntry, Handoffs
from penstock.worker.worker import Worker

_CHUNK = 1 << 20


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """One engine's prefill."""

    def __init__(self, worker: Worker, handoffs: Handoffs) -> None:
        self._worker = worker
        self._handoffs = handoffs

    async def Prefill(
        self,
        request: prefill_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent],
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """Computes the prompt and answers with the first token."""
        message = request.request
        wanted = message.sampling.max_tokens
        first = len(message.output_ids) + 1
        self._worker.check_planned(message, request.capability)
        order = order_from_message(message, self._worker.pictures, max_tokens=min(wanted, first))
        work = self._worker.work(order, hands_on=True)
        name = (message.request_id, request.capability.epoch, request.capability.mac)
        with self._handoffs.offer(name, work.sink) as entry:
            told = 0
            async for update in self._worker.generate(order.request, work):
                for token in update.tokens:
                    cache = cache_to_message(update.computed_tokens, work.used(update))
                    finish = update.finish
                    if finish == "length" and self._more(message):
                        finish = None
                    entry.finish(token)
                    if not told:
                        self._worker.metrics.count_given("prefill", update.computed_tokens, work.used(update))
                    told += 1
                    self._worker.metrics.told.labels("prefill").inc()
                    retained = retained_to_message(await work.retainer.prompt()) if work.retainer else None
                    yield prefill_pb2.PrefillEvent(
                        token=token_to_message(token),
                        finish=finish_to_message(finish),
                        cache=cache,
                        times=times_to_message(update),
                        retained=retained,
                    )

    def _more(self, message: common_pb2.Request) -> bool:
        """Whether a further token may follow the first."""
        used = len(message.output_ids) + 1
        room = self._worker.engine.max_model_len - len(message.prompt_ids)
        return used < min(message.sampling.max_tokens, room)

    async def Handoff(
        self,
        request: prefill_pb2.HandoffRequest,
        context: grpc.aio.ServicerContext[prefill_pb2.HandoffRequest, prefill_pb2.HandoffEvent],
    ) -> AsyncIterator[prefill_pb2.HandoffEvent]:
        """Reports stored blocks as they appear, then the first token and the tail."""
        entry = await self._handoffs.take((request.request_id, request.epoch, request.mac))
        told = -1
        ready = False
        while not ready:
            entry.sink.changed.clear()
            ready = entry.ready
            if entry.failed:
                raise Unavailable("the prefill ended before its first token")
            if entry.sink.stored is not None and entry.sink.stored != told:
                told = entry.sink.stored
                yield prefill_pb2.HandoffEvent(stored_blocks=told)
            if not ready:
                ready = not await entry.news(self._worker.config.store_timeout_s)
        for event in self._last(entry):
            yield event

    def _last(self, entry: HandoffEntry) -> list[prefill_pb2.HandoffEvent]:
        tail = entry.sink.tail
        done = prefill_pb2.Handoff(
            token=token_to_message(entry.token) if entry.token is not None else None,
            valid_tokens=entry.sink.valid_tokens or 0,
            tail_bytes=len(tail),
            tail_checksum=xxhash.xxh3_128_digest(tail) if tail else b"",
            age_s=time.monotonic() - entry.token_at if entry.token is not None else 0.0,
        )
        chunks = [tail[at : at + _CHUNK] for at in range(0, len(tail), _CHUNK)]
        return [
            prefill_pb2.HandoffEvent(done=done),
            *(prefill_pb2.HandoffEvent(tail=chunk) for chunk in chunks),
        ]
