"""The HTTP endpoints that answer with tokens instead of a text of the model, or say that they can't."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.gateway.accounts.admission import ClientGone
from penstock.gateway.api.anthropic.asks import count_prompt
from penstock.gateway.api.inquiry import Json, encode
from penstock.gateway.api.openai.tokenizing import read_detokenize, read_tokenize
from penstock.gateway.api.responses.api import ResponsesApi
from penstock.gateway.door.answering import inquiry_of
from penstock.gateway.door.reception import Reception
from penstock.gateway.door.refusals import Arrival
from penstock.gateway.door.reply import JSON
from penstock.gateway.door.uploads import Uploads
from penstock.gateway.request.ask import Conversation

_THREAD_BODY = 64 * 1024
_SLICE = 8192
"""Tokens that are written in one go: nobody else runs meanwhile."""
Value = TypeVar("Value")


class Counting:
    """The endpoints. They generate nothing, and still are requests: admitted, and counted for the tenant's limits."""

    def __init__(self, reception: Reception, uploads: Uploads) -> None:
        self._reception = reception
        self._uploads = uploads
        self._models = reception.models
        self._responses = ResponsesApi(reception.responses)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        return await self._answer(request, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        return await self._answer(request, self._detokenize)

    async def count(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens"""
        return await self._answer(request, self._count)

    async def input_tokens(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens"""
        return await self._answer(request, self._input_tokens)

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings"""
        self._reception.auth.tenant(request.headers)
        raise InvalidRequest("this model makes no embeddings", field="model", code="unsupported_model")

    async def _answer(self, request: Request, answer: Callable[[Request, str], Awaitable[bytes]]) -> Response:
        try:
            async with self._reception.one(request.headers, Arrival(request.state.request_id)) as tenant:
                return Response(await answer(request, tenant), media_type=JSON)
        except ClientGone:
            return Response(status_code=400)  # the client has left and reads no response

    async def _tokenize(self, request: Request, tenant: str) -> bytes:
        body, prompt = await self._read(request, tenant, read_tokenize)
        model = self._models.of(body.model)
        ids = await model.tokens.of(prompt, tenant, special=body.add_special_tokens is not False)
        name = model.tokens.name if body.return_token_strs else None
        written = partial(_written, {"count": len(ids), "max_model_len": model.context}, ids, name)
        return await self._reception.threads.run(written, len(ids), tenant)

    async def _detokenize(self, request: Request, tenant: str) -> bytes:
        body = await self._read(request, tenant, read_detokenize)
        text = await self._models.of(body.model).tokens.text(body.tokens, tenant)
        return await self._reception.threads.run(lambda: encode({"prompt": text}), len(text), tenant)

    async def _count(self, request: Request, tenant: str) -> bytes:
        model, prompt = await self._read(request, tenant, count_prompt)
        return encode({"input_tokens": len(await self._models.of(model).tokens.of(prompt, tenant))})

    async def _input_tokens(self, request: Request, tenant: str) -> bytes:
        most = self._reception.config.max_body_bytes
        async with self._uploads.body(tenant, request.headers, request.receive, most) as body:
            ask = (await inquiry_of(self._reception, self._responses, body, tenant)).ask
        model = self._models.of(ask.model)
        [prompt] = ask.prompts
        assert isinstance(prompt, Conversation)
        count = len(await model.tokens.of(prompt, tenant))
        return encode({"object": "response.input_tokens", "input_tokens": count})

    async def _read(self, request: Request, tenant: str, read: Callable[[bytes, list[str] | None], Value]) -> Value:
        config = self._reception.config
        ignored: list[str] | None = [] if config.unknown_fields == "warn" else None
        async with self._uploads.body(tenant, request.headers, request.receive, config.max_body_bytes) as body:
            size = len(body) if len(body) >= _THREAD_BODY else 0
            return await self._reception.threads.run(partial(read, body, ignored), size, tenant)


def _written(head: Json, ids: Sequence[int], name: Callable[[int], str | None] | None) -> bytes:
    """The answer to /tokenize."""
    names = b"null" if name is None else _listed(ids, lambda part: [name(token) for token in part])
    return encode(head)[:-1] + b',"tokens":' + _listed(ids, list) + b',"token_strs":' + names + b"}"


def _listed(ids: Sequence[int], shown: Callable[[Sequence[int]], Sequence[object]]) -> bytes:
    parts = (encode(shown(ids[at : at + _SLICE]))[1:-1] for at in range(0, len(ids), _SLICE))
    return b"[" + b",".join(parts) + b"]"
