"""A template that other processes render.

A template is a program: a loop in it, or messages on which a harmless one takes quadratic time, could hold a thread for
ever. Nothing stops a thread; a process can be stopped. What it renders does not hold this process's interpreter either.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from penstock.chat.model import ChatModel
from penstock.chat.resuming.waypoint import Rest, Waypoint
from penstock.chat.template import ChatTemplate, Shown
from penstock.errors import InvalidRequest
from penstock.pictures.apart import pictures_apart
from penstock.runtime.apart.frames import Kind
from penstock.runtime.apart.processes import OutOfTime, ProcessesApart

RENDER_S = 1.0
"""Seconds of a processor for one prompt, many times what the longest takes."""
_MOST = 10
"""Processes; as many as there are threads that render."""
_WAYPOINT = msgspec.json.Decoder(Waypoint | None)
"""Made here, in one thread: msgspec 0.22 has crashed where two were the first to decode a type."""


_SLICE = 1 << 18
"""Bytes that are decoded in one go, and characters that are encoded."""


class RenderProcesses:
    """Renders like the `ChatTemplate` that it is made of, in another process; waits in threads. Made by
    `open_processes`.

    It is asked with JSON: messages, tools, a waypoint, whether an answer is opened, and variables; it answers with the
    next waypoint as JSON, a line feed, and the text, or with nothing where it can't go on from the waypoint.
    """

    def __init__(self, template: ChatTemplate, *, seconds: float = RENDER_S, most: int = _MOST) -> None:
        """`seconds` of a processor are allowed for one prompt; at most `most` processes render."""
        self.source = template.source
        self.variables = template.variables
        setup = json.dumps(
            {"source": template.source, "special_tokens": template.special_tokens, "seconds": seconds}
        ).encode()
        self._apart = ProcessesApart(
            "penstock.chat.rendering", setup, most=most, what="the prompt could not be rendered"
        )
        self.start, self.close = self._apart.start, self._apart.close

    @property
    def pids(self) -> list[int]:
        """Of the processes that are ready or render."""
        return self._apart.pids

    def render(
        self,
        messages: Sequence[Shown],
        tools: Sequence[Shown] | None,
        *,
        generate: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises InvalidRequest as `ChatTemplate.render` does, and when the template takes too long
        or too much memory; Unavailable when the process ends for another reason."""
        rest = self.resume(messages, tools, None, generate=generate, variables=variables)
        assert rest is not None, "a whole rendering is never lost"
        return rest.text

    def resume(
        self,
        messages: Sequence[Shown | str],
        tools: Sequence[Shown] | None,
        waypoint: Waypoint | None,
        *,
        generate: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> Rest | None:
        """See `Renders.resume`; raises like `render`."""
        asked = msgspec.json.encode((_sliced(messages), _sliced(tools), waypoint, generate, variables))
        try:
            return _rest(*self._apart.ask(asked))
        except OutOfTime:
            what = "messages: the chat template takes too long to render these"
            raise InvalidRequest(what, field="messages") from None


def _rest(kind: Kind, content: bytearray) -> Rest | None:
    if kind == "answer":
        end = content.index(b"\n")
        waypoint = _WAYPOINT.decode(memoryview(content)[:end])
        return Rest(_decoded(memoryview(content)[end + 1 :]), waypoint)
    if kind == "nothing":
        return None
    raise InvalidRequest(content.decode(), field="messages")


def _sliced(value: Any) -> Any:
    """A JSON value whose long texts are JSON already, encoded in slices, between which other threads run."""
    if isinstance(value, str):
        return _encoded(value) if len(value) > _SLICE else value
    if isinstance(value, Mapping):
        return {name: _sliced(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sliced(inner) for inner in value]
    return value


def _encoded(text: str) -> msgspec.Raw:
    slices = (msgspec.json.encode(text[at : at + _SLICE])[1:-1] for at in range(0, len(text), _SLICE))
    return msgspec.Raw(b"".join([b'"', *slices, b'"']))


def _decoded(content: memoryview) -> str:
    """In slices, between which other threads run."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    return "".join([decoder.decode(content[at : at + _SLICE]) for at in range(0, len(content), _SLICE)])


@asynccontextmanager
async def open_processes(template: ChatTemplate, *, seconds: float = RENDER_S) -> AsyncIterator[RenderProcesses]:
    """Processes for the length of the block; the first is started at once."""
    processes = RenderProcesses(template, seconds=seconds)
    try:
        await asyncio.to_thread(processes.start)
        yield processes
    finally:
        await asyncio.to_thread(processes.close)


@asynccontextmanager
async def rendering_apart(model: ChatModel) -> AsyncIterator[ChatModel]:
    """`model` with its template, and what reads its pictures, in other processes for the length of the block."""
    async with AsyncExitStack() as stack:
        if isinstance(model.template, ChatTemplate):
            template = await stack.enter_async_context(open_processes(model.template))
            model = replace(model, template=template)
        if model.pictures is not None:
            reading = await stack.enter_async_context(pictures_apart(model.pictures.form))
            model = replace(model, pictures=replace(model.pictures, reader=reading.read))
        yield model
