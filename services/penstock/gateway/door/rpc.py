"""The gRPC door: the same requests, typed."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc

from penstock.errors import InvalidRequest
from penstock.gateway.accounts.auth import session_digest
from penstock.gateway.completing import completion as running
from penstock.gateway.door.operating import evict_tenant, past_request
from penstock.gateway.door.reception import Reception
from penstock.gateway.door.repeats import repeat_key
from penstock.gateway.door.rpc_answers import chat_chunks, text_chunks
from penstock.gateway.door.rpc_asks import Asked, outlook_of, read_chat, read_completion
from penstock.gateway.door.rpc_entrance import current_arrival, texts
from penstock.gateway.request.ask import Ask
from penstock.kv.hint import ReturnHint
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

AnyAsked = TypeVar("AnyAsked", bound=Asked)


class GatewayService(gateway_pb2_grpc.GatewayServicer):
    """Translates messages and delegates to the completer."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception

    async def ChatCompletion(
        self,
        request: gateway_pb2.ChatCompletionRequest,
        context: grpc.aio.ServicerContext[gateway_pb2.ChatCompletionRequest, gateway_pb2.ChatCompletionChunk],
    ) -> AsyncIterator[gateway_pb2.ChatCompletionChunk]:
        """Streams one chat completion; its last message holds the usage."""
        async with self._completion(request, read_chat, context) as completion:
            async for chunk in chat_chunks(completion):
                yield chunk

    async def Completion(
        self,
        request: gateway_pb2.CompletionRequest,
        context: grpc.aio.ServicerContext[gateway_pb2.CompletionRequest, gateway_pb2.CompletionChunk],
    ) -> AsyncIterator[gateway_pb2.CompletionChunk]:
        """Streams one completion of raw prompts; its last message holds the usage."""
        async with self._completion(request, read_completion, context) as completion:
            async for chunk in text_chunks(completion):
                yield chunk

    @asynccontextmanager
    async def _completion(
        self, request: AnyAsked, read: Callable[[AnyAsked, int], Ask], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[running.Completion]:
        """What `request` asks for, for the length of the block; it ends with its client."""
        arrival, headers = current_arrival(), metadata(context)
        most = self._reception.config.max_n
        ask = await self._reception.threads.run(lambda: read(request, most), request.ByteSize(), arrival.tenant)
        left = context.time_remaining()
        caller = running.Caller(
            tenant=arrival.tenant,
            session=session_digest(arrival.tenant, headers, ask.cache_key),
            request_id=arrival.request_id,
            began=arrival.began,
            body_s=time.perf_counter() - arrival.began,
            patience_s=math.inf if left is None else left,
            repeat=repeat_key(headers, self._reception.auth, arrival.tenant),
        )
        async with self._reception.models.open(ask, caller) as completion:
            arrival.begun = True
            yield completion

    async def HintSession(
        self,
        request: gateway_pb2.HintSessionRequest,
        context: grpc.aio.ServicerContext[gateway_pb2.HintSessionRequest, gateway_pb2.HintSessionResponse],
    ) -> gateway_pb2.HintSessionResponse:
        """Passes on a client's hint about its session, without a request of it. Raises InvalidRequest when the hint is
        empty."""
        headers = metadata(context)
        tenant = self._reception.auth.tenant(headers)
        outlook = outlook_of(request.session)
        if outlook == ReturnHint():
            raise InvalidRequest("session: set ended or returns_in_s", field="session")
        session = session_digest(tenant, headers, request.prompt_cache_key or None)
        if not session:
            raise InvalidRequest("x-session-affinity: this metadata must name the session", field="x-session-affinity")
        await self._reception.models.hint(session, outlook)
        return gateway_pb2.HintSessionResponse()

    async def PastRequest(
        self,
        request: gateway_pb2.PastRequestQuery,
        context: grpc.aio.ServicerContext[gateway_pb2.PastRequestQuery, gateway_pb2.PastRequestRecord],
    ) -> gateway_pb2.PastRequestRecord:
        """What became of a request that has ended."""
        found = past_request(self._reception, request.id, metadata(context))
        return gateway_pb2.PastRequestRecord(json=found.decode())

    async def EvictTenant(
        self,
        request: gateway_pb2.EvictTenantRequest,
        context: grpc.aio.ServicerContext[gateway_pb2.EvictTenantRequest, gateway_pb2.EvictTenantResponse],
    ) -> gateway_pb2.EvictTenantResponse:
        """Has all stores and workers drop the blocks of a tenant."""
        members = await evict_tenant(self._reception, request.tenant, metadata(context))
        return gateway_pb2.EvictTenantResponse(members=members)

    async def ListModels(
        self,
        request: gateway_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[gateway_pb2.ListModelsRequest, gateway_pb2.ListModelsResponse],
    ) -> gateway_pb2.ListModelsResponse:
        """The served models."""
        started = self._reception.started
        models = [
            gateway_pb2.Model(id=model.name, created=started, context_length=model.context or 0, parent=model.base)
            for model in self._reception.models.every()
        ]
        return gateway_pb2.ListModelsResponse(models=models)


def metadata(context: grpc.aio.ServicerContext[Any, Any]) -> Mapping[str, str]:
    """The text entries of the call's metadata."""
    return texts(context.invocation_metadata() or ())
