"""The Draft servicer: translates messages and delegates to the streams and the proposer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from penstock.draft.backlog import open_backlog
from penstock.draft.config import DraftConfig
from penstock.draft.drafts import Drafts, load_drafts
from penstock.draft.stream import DraftStream
from penstock.rpc.server import serve
from penstock.runtime.metrics import DraftMetrics
from penstock.v1 import draft_pb2, draft_pb2_grpc

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["Draft"].full_name


class DraftService(draft_pb2_grpc.DraftServicer):
    """Many streams, one proposer."""

    def __init__(self, drafts: Drafts, config: DraftConfig) -> None:
        self._drafts = drafts
        self._config = config
        self._names = itertools.count(1)

    async def Propose(
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftAsk],
        context: grpc.aio.ServicerContext[draft_pb2.DraftAsk, draft_pb2.DraftProposal],
    ) -> AsyncIterator[draft_pb2.DraftProposal]:
        """Answers every ask in order; one that was overtaken while it waited gets an empty answer."""
        stream = DraftStream(next(self._names), self._drafts.forget, self._config, self._drafts.guide)
        try:
            async with open_backlog(request_iterator, self._drafts.metrics.task_failed) as backlog:
                while asks := await backlog.take():
                    for ask in asks:
                        stream.apply(ask)
                        if ask is not asks[-1]:
                            yield draft_pb2.DraftProposal(number=ask.number, unknown=stream.unknown(ask))
                    yield await self._answer(stream, asks[-1])
        finally:
            stream.close()

    async def _answer(self, stream: DraftStream, message: draft_pb2.DraftAsk) -> draft_pb2.DraftProposal:
        asks = stream.asks(message)
        answers = await self._drafts.propose([ask for _, ask in asks]) if asks else []
        return draft_pb2.DraftProposal(
            number=message.number,
            sequences=[
                draft_pb2.DraftTokens(id=id, tokens=tokens)
                for (id, _), tokens in zip(asks, answers, strict=True)
                if tokens
            ],
            unknown=stream.unknown(message),
        )

    async def Describe(
        self,
        request: draft_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext[draft_pb2.DescribeRequest, draft_pb2.DescribeResponse],
    ) -> draft_pb2.DescribeResponse:
        """Names the proposer and its vocabulary."""
        found = self._drafts.description
        return draft_pb2.DescribeResponse(
            proposer=found.proposer, tokenizer=found.tokenizer, vocab_size=found.vocab_size
        )


@dataclass(frozen=True)
class ServedDraft:
    """A draft service that serves."""

    address: str
    metrics: DraftMetrics


@asynccontextmanager
async def open_draft(config: DraftConfig) -> AsyncIterator[ServedDraft]:
    """Serves proposals until the block ends."""
    drafts = await asyncio.to_thread(load_drafts, config)

    def register(server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServicer_to_server(DraftService(drafts, config), server)

    try:
        async with serve(config.address, register, [SERVICE], max_calls=config.max_streams, grace=0.2) as server:
            await server.set_serving(True)
            yield ServedDraft(config.address.at(server.port), drafts.metrics)
    finally:
        drafts.close()
