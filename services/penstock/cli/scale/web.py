"""Calls over HTTP, without following redirections or going through proxies: each goes to the address that was set."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

_MOST_BYTES = 16 << 20


class NoAnswer(Exception):
    """The other side could not be reached, or did not answer as HTTP has it; the text says why."""


@dataclass(frozen=True, slots=True)
class WebAnswer:
    """What came back."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def start(self) -> str:
        """Of the body, for messages."""
        return self.body[:200].decode(errors="replace")


class _Stay(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """A redirection is an answer like any other."""


async def call(
    url: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    ca: Path | None = None,
    timeout_s: float = 5.0,
) -> WebAnswer:
    """One request, in a thread. `ca`: who signs the other side's certificate, else those that the system trusts. Raises
    NoAnswer."""
    request = Request(url, data=body, headers=dict(headers or {}), method=method)
    return await asyncio.to_thread(_called, request, ca, timeout_s)


def _called(request: Request, ca: Path | None, timeout_s: float) -> WebAnswer:
    try:
        context = ssl.create_default_context(cafile=ca) if request.type == "https" else None
        opener = build_opener(ProxyHandler({}), _Stay(), HTTPSHandler(context=context))
        with opener.open(request, timeout=timeout_s) as answer:
            return WebAnswer(answer.status, answer.read(_MOST_BYTES), dict(answer.headers))
    except HTTPError as error:
        with error:
            return WebAnswer(error.code, error.read(_MOST_BYTES), dict(error.headers))
    except (OSError, HTTPException, ValueError) as error:
        raise NoAnswer(f"{request.full_url}: {error}") from None
