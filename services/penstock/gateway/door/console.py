"""The operator's console at /console: a page, and what it shows as JSON.

The files of the page are in the package and say nothing of the mesh; its figures want an operator's key. Where no keys
are set, the gateway listens on this host alone, and neither a page of another site gets them, nor one whose name only
resolves to this host: a browser would send it everything.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import Forbidden, NotFound
from penstock.gateway.console.files import HEADERS, PAGE, page_files
from penstock.gateway.door.operating import check_operator, past_request
from penstock.gateway.door.reception import Reception
from penstock.gateway.door.reply import JSON
from penstock.gateway.mesh.shown import ShownMesh
from penstock.runtime.addresses import is_loopback

MOST_REQUESTS = 100
_OWN_SITE = ("", "same-origin", "none")
"""What a browser says of the site of a page that asks for something of its own, or of a person who does."""


class _Error(msgspec.Struct):
    message: str
    code: str | None = None


class _Tokens(msgspec.Struct):
    prompt: int
    computed: int
    cached: dict[str, int]
    completion: int
    drafted: int
    accepted: int


class _Times(msgspec.Struct):
    first_token: float
    total: float


class _Summary(msgspec.Struct):
    """What the list of requests has of a record."""

    request_id: str
    tenant: str
    status: str
    created: int
    model: str = ""
    replans: int = 0
    error: _Error | None = None
    tokens: _Tokens | None = None
    times: _Times | None = None


_SUMMARY = msgspec.json.Decoder(_Summary)


def console_routes(reception: Reception) -> list[Route]:
    """The page, its files and its endpoints."""
    console = _Console(reception)
    return [
        Route("/console", console.page, methods=["GET"]),
        Route("/console/files/{name}", console.file, methods=["GET"]),
        Route("/console/api/top", console.top, methods=["GET"]),
        Route("/console/api/sessions", console.sessions, methods=["GET"]),
        Route("/console/api/requests", console.requests, methods=["GET"]),
        Route("/console/api/requests/{id}", console.request, methods=["GET"]),
    ]


class _Console:
    """The endpoints."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception
        self._mesh = ShownMesh(reception.sites)
        self._keyless = reception.config.api_keys is None

    async def page(self, request: Request) -> Response:
        """GET /console"""
        return self._file(request, PAGE)

    async def file(self, request: Request) -> Response:
        """GET /console/files/{name}"""
        return self._file(request, request.path_params["name"])

    async def top(self, request: Request) -> Response:
        """GET /console/api/top: members with their loads, and what they did."""
        self._check(request)
        return _json(await self._mesh.frame())

    async def sessions(self, request: Request) -> Response:
        """GET /console/api/sessions: the latest ones."""
        self._check(request)
        return _json(await self._mesh.sessions())

    async def requests(self, request: Request) -> Response:
        """GET /console/api/requests: the last that have ended here, or were refused, of all tenants."""
        self._check(request)
        found = [*self._reception.past.latest(MOST_REQUESTS), *self._reception.refusals.past.latest(MOST_REQUESTS)]
        found.sort(key=lambda one: -one[0])
        return _json({"requests": [_SUMMARY.decode(text) for _, text in found[:MOST_REQUESTS]]})

    async def request(self, request: Request) -> Response:
        """GET /console/api/requests/{id}: what became of one, and what the routers weighed for it."""
        self._check(request)
        record = past_request(self._reception, request.path_params["id"], request.headers)
        return _json(await self._mesh.explained(msgspec.json.decode(record)))

    def _file(self, request: Request, name: str) -> Response:
        self._host(request)
        found = page_files().get(name)
        if found is None:
            raise NotFound(f"the console has no file {name[:100]!r}", code="not_found")
        headers = {**HEADERS, "etag": found.etag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.body, headers=headers, media_type=found.kind)

    def _check(self, request: Request) -> None:
        """Raises Unauthenticated, and Forbidden for those who may not see the mesh."""
        host, headers = self._host(request), request.headers
        if self._keyless:
            foreign = "origin" in headers and headers["origin"].partition("://")[2].lower() != host.lower()
            if foreign or headers.get("sec-fetch-site", "") not in _OWN_SITE:
                what = "origin: pages of other sites may not read the console"
                raise Forbidden(what, field="origin", code="foreign_origin")
        check_operator(self._reception, headers)

    def _host(self, request: Request) -> str:
        """By which name the gateway was asked. Raises Forbidden where no key is asked for and it is not this host's:
        any page can have a name that resolves to this host later."""
        host = request.headers.get("host", "")
        if self._keyless and not is_loopback(_name(host)):
            right = f"use 127.0.0.1, not {host[:100]!r}"
            raise Forbidden(f"host: without api_keys the console is for this host alone; {right}", code="foreign_host")
        return host


def _name(host: str) -> str:
    """The name in a header Host, without the port; empty for what is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), headers={**HEADERS, "cache-control": "no-store"}, media_type=JSON)
