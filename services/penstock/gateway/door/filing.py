"""The HTTP endpoints for files and batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from penstock.errors import DeadlineExceeded, NotFound, UnsupportedEncoding
from penstock.gateway.accounts.admission import ClientGone
from penstock.gateway.api.inquiry import encode
from penstock.gateway.api.openai.batch_bodies import read_batch
from penstock.gateway.batches.desk import BatchDesk
from penstock.gateway.batches.form import FileForm
from penstock.gateway.batches.records import Json
from penstock.gateway.door.reception import Reception
from penstock.gateway.door.reply import JSON
from penstock.gateway.door.uploads import Uploads

_BATCH_BYTES = 64 * 1024
"""Of the body that begins a batch."""
_SILENCE_S, _UPLOAD_S = 30.0, 3600.0
"""Most seconds between two pieces of a file, and for all of them."""
_JSON_LINES = "application/jsonl"


class FilingPages:
    """What a client may do with the files and batches of its tenant."""

    def __init__(self, reception: Reception, uploads: Uploads) -> None:
        self._reception = reception
        self._uploads = uploads

    async def files(self, request: Request) -> Response:
        """GET and POST /v1/files"""
        tenant, desk = self._visit(request)
        if request.method == "GET":
            return _json(await desk.files.page(tenant, request.query_params))
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            what = "content-encoding: a file is sent as it is"
            raise UnsupportedEncoding(what, field="content-encoding", code="unsupported_encoding")
        try:
            async with self._reception.drain.running():
                form = FileForm(request.headers.get("content-type", ""))
                return _json((await desk.files.upload(tenant, form, _pieces(request))).shown())
        except ClientGone:
            return Response(status_code=400)  # the client has left and reads no response

    async def file(self, request: Request) -> Response:
        """GET and DELETE /v1/files/{id}"""
        tenant, desk = self._visit(request)
        id = request.path_params["id"]
        if request.method == "DELETE":
            return _json(await desk.files.delete(tenant, id))
        return _json((await desk.files.find(tenant, id)).shown())

    async def content(self, request: Request) -> Response:
        """GET /v1/files/{id}/content"""
        tenant, desk = self._visit(request)
        file = await desk.files.find(tenant, request.path_params["id"])
        headers = {"content-length": str(file.bytes)}
        return StreamingResponse(desk.files.read(file), media_type=_JSON_LINES, headers=headers)

    async def batches(self, request: Request) -> Response:
        """GET and POST /v1/batches"""
        tenant, desk = self._visit(request)
        if request.method == "GET":
            return _json(await desk.page(tenant, request.query_params))
        ignored: list[str] | None = [] if self._reception.config.unknown_fields == "warn" else None
        try:
            async with self._uploads.body(tenant, request.headers, request.receive, _BATCH_BYTES) as body:
                asked = read_batch(body, ignored)
        except ClientGone:
            return Response(status_code=400)  # the client has left and reads no response
        return _json((await desk.begin(tenant, asked)).shown())

    async def batch(self, request: Request) -> Response:
        """GET /v1/batches/{id}"""
        tenant, desk = self._visit(request)
        return _json((await desk.find(tenant, request.path_params["id"])).shown())

    async def cancel(self, request: Request) -> Response:
        """POST /v1/batches/{id}/cancel"""
        tenant, desk = self._visit(request)
        return _json((await desk.cancel(tenant, request.path_params["id"])).shown())

    def _visit(self, request: Request) -> tuple[str, BatchDesk]:
        """Whose key it is, and where its files are. Raises NotFound where there is nothing of the kind."""
        tenant = self._reception.auth.tenant(request.headers)
        desk = self._reception.batches
        if desk is None:
            right = "start the gateway with --batch-store, a directory or a Redis"
            raise NotFound(f"files and batches are not kept here: {right}", code="no_batch_store")
        return tenant, desk


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """A body as it arrives. Raises DeadlineExceeded and ClientGone."""
    loop, more = asyncio.get_running_loop(), True
    until = loop.time() + _UPLOAD_S
    while more:
        try:
            async with asyncio.timeout(min(_SILENCE_S, until - loop.time())):
                message: Message = await request.receive()
        except TimeoutError:
            raise DeadlineExceeded("the body took too long to arrive", code="timeout") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        more = message.get("more_body", False)


def _json(value: Json) -> Response:
    return Response(encode(value), media_type=JSON)
