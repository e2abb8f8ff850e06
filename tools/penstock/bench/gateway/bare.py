"""What the gateway is measured beside: an SSE endpoint of starlette under uvicorn that writes one chunk after
the other, in a process of its own. It has nobody behind it, no choices, and nothing to count."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from penstock.runtime.lifecycle import Lifecycle, run

_HEAD = {"id": "chatcmpl-0123456789abcdef01234567", "object": "chat.completion.chunk", "created": 1, "model": "bare"}


class Bare:
    """The application."""

    def __init__(self) -> None:
        self._crowd = 0
        self._gate = asyncio.Event()

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions: as many chunks as asked for, none but the first before `top_k` streams stand."""
        body = json.loads(await request.body())
        return StreamingResponse(self._chunks(body["max_tokens"], body["top_k"]), media_type="text/event-stream")

    async def _chunks(self, count: int, crowd: int) -> AsyncIterator[bytes]:
        yield _chunk(0)
        self._crowd += 1
        if self._crowd < crowd:
            await self._gate.wait()
        else:
            self._crowd = 0
            self._gate.set()
            self._gate = asyncio.Event()
        for index in range(1, count):
            await asyncio.sleep(0)  # else one stream has the loop until its client is slow
            yield _chunk(index)
        yield b"data: [DONE]\n\n"


def _chunk(index: int) -> bytes:
    choice = {"index": 0, "delta": {"content": f" word{index % 10}"}, "logprobs": None, "finish_reason": None}
    return b"data: " + json.dumps({**_HEAD, "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


async def main(lifecycle: Lifecycle) -> None:
    """Serves until told to stop."""
    app = Starlette(routes=[Route("/v1/chat/completions", Bare().chat, methods=["POST"])])
    settings = uvicorn.Config(app, http="httptools", log_config=None, access_log=False, lifespan="off", backlog=2048)
    server = uvicorn.Server(settings)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve([listener]))
            lifecycle.ready(address=f"127.0.0.1:{listener.getsockname()[1]}")
            await lifecycle.stopped()
            server.should_exit = True
            await serving


if __name__ == "__main__":
    run(main)
