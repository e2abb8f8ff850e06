"""The Draft servicer: translates messages and delegates to the streams and the model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import grpc

from penstock.draft.config import DraftConfig
from penstock.draft.drafts import Drafts, load_draft, open_drafts
from penstock.draft.kv import open_draft_kv
from penstock.draft.membership import draft_membership
from penstock.draft.stream import DraftStream
from penstock.rpc.identity import MemberIdentity
from penstock.rpc.server import serve
from penstock.runtime.metrics import DraftMetrics
from penstock.runtime.tasks import alongside
from penstock.v1 import draft_pb2, draft_pb2_grpc

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["Draft"].full_name
_PART = 4096
"""Tokens of a vocabulary in one message."""


class DraftService(draft_pb2_grpc.DraftServicer):
    """Many streams, one model."""

    def __init__(self, drafts: Drafts, config: DraftConfig) -> None:
        self._drafts = drafts
        self._config = config
        self._names = itertools.count(1)

    async def Propose(
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftNews],
        context: grpc.aio.ServicerContext[draft_pb2.DraftNews, draft_pb2.DraftLeads],
    ) -> AsyncIterator[draft_pb2.DraftLeads]:
        """Sends what is guessed for the sequences that it hears of, as it comes to be."""
        stream = DraftStream(next(self._names), self._drafts, self._config)
        try:
            async with alongside(stream.read(request_iterator), over=stream.end):
                async for message in stream.messages():
                    yield message
        finally:
            stream.close()

    async def Describe(
        self,
        request: draft_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext[draft_pb2.DescribeRequest, draft_pb2.DescribeResponse],
    ) -> draft_pb2.DescribeResponse:
        """Names the vocabulary, and what else is to be told than tokens."""
        own = self._drafts.description
        return draft_pb2.DescribeResponse(tokenizer=own.tokenizer, layers=own.layers, hidden=own.hidden)

    async def Vocabulary(
        self,
        request: draft_pb2.VocabularyRequest,
        context: grpc.aio.ServicerContext[draft_pb2.VocabularyRequest, draft_pb2.VocabularyPart],
    ) -> AsyncIterator[draft_pb2.VocabularyPart]:
        """Every token, in parts."""
        rest = iter((await asyncio.to_thread(self._drafts.description.vocabulary)).items())
        while part := dict(islice(rest, _PART)):
            yield draft_pb2.VocabularyPart(texts=part, ids=part.values())


@dataclass(frozen=True)
class ServedDraft:
    """A draft service that serves."""

    address: str
    metrics: DraftMetrics


@asynccontextmanager
async def open_draft(config: DraftConfig) -> AsyncIterator[ServedDraft]:
    """Drafts until the block ends."""
    loaded, metrics = await asyncio.to_thread(load_draft, config), DraftMetrics()
    member = MemberIdentity.of(config.member_tls, "draft")
    async with (
        open_draft_kv(config, loaded.model, metrics, member) as kv,
        open_drafts(loaded.model, loaded.description, loaded.ruling, metrics=metrics, kv=kv) as drafts,
    ):
        register = partial(draft_pb2_grpc.add_DraftServicer_to_server, DraftService(drafts, config))
        async with serve(
            config.address, register, [SERVICE], max_calls=config.max_streams, grace=0.2, member=member
        ) as server:
            await server.set_serving(True)
            address = config.address.at(server.port)
            async with draft_membership(config, drafts, address, member):
                yield ServedDraft(address, metrics)
