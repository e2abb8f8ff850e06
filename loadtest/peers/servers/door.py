"""As little of an HTTP server as can be, for peers that bring none: /health, and /v1/completions of token ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
Told = Callable[[Sequence[int]], None]
"""Hears of new tokens; of none at the end. Called in any thread."""


class Generator(Protocol):
    """What generates behind the door."""

    def add(self, prompt: Sequence[int], tokens: int, told: Told) -> None:
        """Starts a request for exactly `tokens` greedy tokens."""
        ...


async def serve_door(generator: Generator, checkpoint: Path, port: int) -> None:
    """Serves on 127.0.0.1 until it is ended."""
    from tokenizers import Tokenizer

    door = _Door(generator, Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
    async with await asyncio.start_server(door.answer, "127.0.0.1", port) as server:
        await server.serve_forever()


class _Door:
    def __init__(self, generator: Generator, tokenizer: Any) -> None:
        self._generator = generator
        self._tokenizer = tokenizer

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            if head[0].startswith("get /health"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                return
            lengths = [int(line.partition(":")[2]) for line in head if line.startswith("content-length:")]
            body = json.loads(await reader.readexactly(lengths[0]))
            writer.write(_HEAD)
            await self._stream(body["prompt"], body["max_tokens"], writer)
        finally:
            writer.close()

    async def _stream(self, prompt: Sequence[int], tokens: int, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Sequence[int]] = asyncio.Queue()

        def told(ids: Sequence[int]) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, ids)

        self._generator.add(prompt, tokens, told)
        while ids := await pieces.get():
            text = self._tokenizer.decode(list(ids))
            self._write(writer, {"choices": [{"index": 0, "text": text, "token_ids": ids}]})
            await writer.drain()
        self._write(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        self._write(writer, {"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": tokens}})
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()

    def _write(self, writer: asyncio.StreamWriter, values: object) -> None:
        writer.write(b"data: " + json.dumps(values).encode() + b"\n\n")
