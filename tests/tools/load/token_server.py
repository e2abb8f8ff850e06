"""A server that streams what it is told to, event by event, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass
class Script:
    """What the server does with each request: statuses to refuse with first, then writes, one after the other."""

    writes: Callable[[Body], Sequence[bytes]]
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """Status and further header lines."""
    cut: bool = False
    """Whether the connection ends before the answer does."""
    hold: Callable[[Body, Script], Awaitable[None]] | None = None
    """Waits before the last write of an answer."""
    asked: list[Body] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)


def event(values: object) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"


def completion(body: Body) -> Sequence[bytes]:
    """As /v1/completions: the first token alone, then two by two; the usage at the end."""
    ids = list(range(1000, 1000 + body["max_tokens"]))
    pieces = [ids[:1], *(ids[at : at + 2] for at in range(1, len(ids), 2))]
    usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 16}}
    usage["completion_tokens"] = body["max_tokens"]
    events = [event({"choices": [{"text": "x", "token_ids": piece}]}) for piece in pieces]
    end = event({"choices": [{"text": "", "token_ids": [], "finish_reason": "length"}]})
    return [*events, end, event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[int]:
    """The port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _answer(script, reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def _answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    body = json.loads(await reader.readexactly(int(headers["content-length"])))
    if script.refusals:
        status, lines = script.refusals.pop(0)
        writer.write(f"HTTP/1.1 {status} no\r\n{lines}content-length: 4\r\n\r\nbusy".encode())
        return
    script.asked.append(body)
    script.sessions.append(headers["x-session-affinity"])
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    pieces = script.writes(body)
    for number, piece in enumerate(pieces, 1):
        if script.hold and number == len(pieces):
            await script.hold(body, script)
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
    if not script.cut:
        writer.write(b"0\r\n\r\n")
