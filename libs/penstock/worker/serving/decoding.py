"""The Decode servicer: translates messages and delegates to the engine, the hand-off and the draft client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial

import grpc

from penstock.engine.request import Update
from penstock.rpc.bounds import bad, check_address
from penstock.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2
from penstock.worker.convert import (
    cache_to_message,
    drafts_to_message,
    finish_to_message,
    order_from_message,
    retained_to_message,
    times_to_message,
    token_to_message,
)
from penstock.worker.progress import patience_s
from penstock.worker.serving.drafting import DraftClient
from penstock.worker.serving.listening import Listeners, Way, say_told
from penstock.worker.serving.prefix import HandoffPrefix
from penstock.worker.worker import Work, Worker


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """One engine's decode."""

    def __init__(self, worker: Worker, drafter: DraftClient | None) -> None:
        self._worker = worker
        self._drafter = drafter
        self._listeners = Listeners(worker.metrics.told.labels("decode").inc, self._patience_s)

    async def Generate(
        self,
        request: decode_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[decode_pb2.GenerateRequest, decode_pb2.GenerateEvent],
    ) -> AsyncIterator[decode_pb2.GenerateEvent]:
        """Streams tokens until the sequence ends, here or to a listener."""
        async with (
            self._listeners.way(request.to, partial(say_told, context)) as way,
            aclosing(self._events(request, context.time_remaining(), way)) as events,
        ):
            async for event in events:
                if not await way.send(event):
                    yield event

    async def _events(
        self, request: decode_pb2.GenerateRequest, left_s: float | None, way: Way
    ) -> AsyncGenerator[decode_pb2.GenerateEvent, None]:
        """Those events of a request that `way` does not take as they come to be: at least the first and the last."""
        self._worker.check_planned(request.request, request.capability)
        order = order_from_message(request.request, self._worker.pictures)
        asked, work = order.request, self._worker.work(order)
        metrics, source = self._worker.metrics, None
        if request.HasField("handoff"):
            address = check_address("handoff.address", request.handoff.address)
            if request.handoff.address != request.capability.prefill:
                raise bad("handoff.address", repr(request.handoff.address), "must be that of the capability")
            lent = partial(self._worker.channels.lent, address, "worker")
            wanted = prefill_pb2.HandoffRequest(
                request_id=asked.id, epoch=request.capability.epoch, mac=request.handoff.mac
            )
            size = self._worker.engine.spec.block_bytes
            costs = self._worker.handoffs
            source = HandoffPrefix(lent, wanted, work, costs, left_s, block_bytes=size, metrics=metrics)
        first, counted = True, False
        try:
            if self._drafter is not None:
                self._drafter.begin(asked.id)
            # Who yields has no next turn that would find its blocks, and others' are worth more.
            publish = not asked.yields
            async for update in self._worker.generate(asked, work, source, way.relay, publish=publish):
                event = _event(update, work, source, first)
                if work.retainer and (first or update.finish is not None):
                    ended = update.finish is not None
                    kept = await (work.retainer.answer(work.sink.keys) if ended else work.retainer.prompt())
                    event.retained.CopyFrom(retained_to_message(kept))
                if event.HasField("cache") and not counted:
                    metrics.count_given("decode", update.computed_tokens, work.used(update))
                    counted = True
                metrics.told.labels("decode").inc(len(event.tokens))
                if update.finish is not None:
                    metrics.count_ended(update.preemptions)
                yield event
                first = False
        finally:
            if self._drafter is not None:
                self._drafter.forget(asked.id)

    async def Listen(
        self,
        request: decode_pb2.ListenRequest,
        context: grpc.aio.ServicerContext[decode_pb2.ListenRequest, decode_pb2.TokenBatch],
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        """Streams what the calls that name this listener generate."""
        with self._listeners.opened(request.listener) as listener:
            async for batch in listener.batches():
                yield batch

    def _patience_s(self) -> float:
        return patience_s(self._worker.engine.stats(), self._worker.config.step_limit_s)


def _event(update: Update, work: Work, source: HandoffPrefix | None, first: bool) -> decode_pb2.GenerateEvent:
    event = decode_pb2.GenerateEvent(
        tokens=[token_to_message(token) for token in update.tokens],
        finish=finish_to_message(update.finish),
        drafts=drafts_to_message(update.drafts) if update.drafts.any else None,
        handoff_failed=source is not None and source.failed,
    )
    if first or update.finish is not None:
        if source is None or source.failed:
            event.cache.CopyFrom(cache_to_message(update.computed_tokens, work.used(update)))
        event.times.CopyFrom(times_to_message(update))
        if update.finish is None:
            event.times.decode = 0.0
    return event
