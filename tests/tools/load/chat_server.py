"""A chat server that answers as it is told to, over real sockets, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.tools.load.token_server import completion

TOKENS_PER_WORD = 2
OVERHEAD = 5
"""Tokens of a prompt's template."""
TOOL = 20
"""Tokens of a definition of a tool beside its description."""
CONTEXT = 16_384


@dataclass(frozen=True)
class Said:
    """One answer."""

    tokens: int | None = None
    """Default: as many as were asked for."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    call: str = ""
    """The name of a tool that it calls."""
    cut: bool = False
    """Whether it ends without a finish_reason."""
    error: str = ""
    """An error in the middle of the stream."""
    usage: dict[str, Any] = field(default_factory=dict)
    """More of the usage."""


@dataclass
class ChatServer:
    """A running server. Prompts of its probes are not remembered: those have max_tokens 1."""

    url: str
    answer: Callable[[dict[str, Any]], Awaitable[Said]]
    asked: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    knows_tools: bool = True
    counts: bool = True
    """Whether it tells the usage."""
    tells_ids: bool = True
    """Whether completions have the ids of their tokens."""

    async def chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        said = Said()
        if body["max_tokens"] > 1:
            self.asked.append(body)
            self.sessions.append(request.headers.get("x-session-affinity", ""))
            said = await self.answer(body)
        if said.status != 200:
            return JSONResponse({"error": {"message": "not now"}}, said.status, said.headers)
        return StreamingResponse(self._events(body, said), media_type="text/event-stream")

    async def completions(self, request: Request) -> Response:
        """Ids of tokens, two in a part but for the first; see `token_server`."""
        body = json.loads(await request.body())
        self.asked.append(body)
        self.sessions.append(request.headers.get("x-session-affinity", ""))
        events = completion(body)
        if not self.tells_ids:
            events = [event.replace(b"token_ids", b"other") for event in events]
        return Response(b"".join(events), media_type="text/event-stream")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake", "max_model_len": CONTEXT}]})

    def length(self, body: dict[str, Any]) -> int:
        words = sum(len((message["content"] or "").split()) for message in body["messages"])
        functions = [tool["function"] for tool in body.get("tools", [])] if self.knows_tools else []
        words += sum(len(function["description"].split()) for function in functions)
        return OVERHEAD + TOKENS_PER_WORD * words + TOOL * len(functions)

    async def _events(self, body: dict[str, Any], said: Said) -> AsyncIterator[bytes]:
        count = body["max_tokens"] if said.tokens is None else said.tokens
        yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for number in range(count):
            yield event({"choices": [{"index": 0, "delta": {"content": f" w{number}"}, "finish_reason": None}]})
        if said.call:
            call = {"index": 0, "id": "call_7", "function": {"name": said.call, "arguments": '{"target":'}}
            yield event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
            more = {"index": 0, "function": {"arguments": '"x"}'}}
            yield event({"choices": [{"index": 0, "delta": {"tool_calls": [more]}}]})
        if said.error:
            yield event({"error": {"message": said.error}})
            return
        if said.cut:
            return
        yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": None})
        if not self.counts:
            return
        usage = {"prompt_tokens": self.length(body), "completion_tokens": count, **said.usage}
        yield event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def event(values: object) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"


async def at_once(body: dict[str, Any]) -> Said:
    """Answers what was asked for."""
    return Said()


@asynccontextmanager
async def serving(answer: Callable[[dict[str, Any]], Awaitable[Said]] = at_once) -> AsyncIterator[ChatServer]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        server = ChatServer(f"http://127.0.0.1:{listener.getsockname()[1]}", answer)
        routes = [
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/models", server.models),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_config=None, lifespan="off", timeout_graceful_shutdown=0)
        running = uvicorn.Server(config)
        serve = asyncio.create_task(running.serve([listener]))
        try:
            yield server
        finally:
            running.should_exit = True
            await serve
