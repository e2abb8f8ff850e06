"""Translates bodies of Messages into the gateway's own requests."""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.chat.messages import Call, Message, PictureLink, Rendering, Tool
from penstock.errors import InvalidRequest
from penstock.gateway.api.anthropic.bodies import (
    AnyBlock,
    ContentBlock,
    CountBody,
    CustomToolBody,
    MessagesBody,
    PlainBlock,
    ShownBlock,
    TurnBody,
    read_count,
    read_messages,
)
from penstock.gateway.api.constraints import output_format
from penstock.gateway.api.extension import CacheControl, Extension, check_marks, keeps_of
from penstock.gateway.api.fields import decoded
from penstock.gateway.api.nodes import Nodes
from penstock.gateway.request import bounds
from penstock.gateway.request.ask import Ask, Conversation, Sampling
from penstock.gateway.request.bounds import check, check_count
from penstock.gateway.request.calling import Calling, calling, check_tools
from penstock.gateway.request.rendering import effort
from penstock.kv.hint import ReturnHint

_ERROR = "Error: "
"""In front of what a tool says that has failed."""
_MODES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


def messages_ask(raw: bytes, ignored: list[str] | None = None) -> Ask:
    """Reads a request for a message. Raises InvalidRequest naming the field; see `BodyReader.read` for `ignored`."""
    Nodes().add(raw)
    body = read_messages(raw, ignored)
    check("anthropic.temperature", body.temperature, "temperature")
    extension = body.penstock or Extension()
    ask = Ask(
        model=body.model,
        prompts=[_conversation(body)],
        sampling=Sampling(
            max_tokens=body.max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or 0,
            drafts=extension.drafts is not False,
        ),
        stops=tuple(body.stop_sequences or ()),
        stream=bool(body.stream),
        retain_s=extension.retain_s(),
        outlook=extension.session.outlook("penstock.session") if extension.session else ReturnHint(),
        urgency=extension.urgency(),
        stops_field="stop_sequences",
        constraint=output_format(bytes(body.output_config.format)) if body.output_config else None,
    )
    ask.check(1)
    return ask


def count_prompt(raw: bytes, ignored: list[str] | None = None) -> tuple[str, Conversation]:
    """Reads a request to count tokens: the model, and the prompt. Raises InvalidRequest naming the field."""
    Nodes().add(raw)
    body = read_count(raw, ignored)
    return body.model, _conversation(body)


def _conversation(body: MessagesBody | CountBody) -> Conversation:
    check_count("messages", len(body.messages), bounds.MAX_MESSAGES)
    if not body.messages:
        raise InvalidRequest("messages: must not be empty", field="messages")
    script = Transcript(body.system)
    for at, turn in enumerate(body.messages):
        script.add(turn, f"messages[{at}]")
    if not script.messages:
        raise InvalidRequest("messages: must have content", field="messages")
    for at, tool in enumerate(body.tools or ()):
        if tool.cache_control is not None:  # a template shows tools with the first message
            script.mark_tools(f"tools[{at}].cache_control", tool.cache_control)
    if body.cache_control is not None:
        script.mark("cache_control", body.cache_control)
    tools = tuple(_tool(tool, at) for at, tool in enumerate(body.tools or ()))
    check_tools(tools, "tools[{at}].name")
    keeps = tuple(keeps_of(script.messages, script.marks))
    return Conversation(script.messages, tools, _calling(body, tools), keeps, _rendering(body))


def _rendering(body: MessagesBody | CountBody) -> Rendering:
    wished = effort(body.output_config.effort, "output_config.effort") if body.output_config else ()
    return Rendering(continued=body.messages[-1].role == "assistant", variables=wished)


def _calling(body: MessagesBody | CountBody, tools: Sequence[Tool]) -> Calling | None:
    choice = body.tool_choice
    if choice is None:
        return calling(tools, "auto")
    if (choice.name is not None) != (choice.type == "tool"):
        raise InvalidRequest("tool_choice.name: belongs to the type tool", field="tool_choice.name")
    only = None if choice.name is None else [choice.name]
    return calling(tools, _MODES[choice.type], only, parallel=not choice.disable_parallel_tool_use)


def _tool(body: CustomToolBody, at: int) -> Tool:
    if body.type not in (None, "custom"):
        what = f"tools[{at}].type: {str(body.type)[:40]!r} is not supported; only custom is"
        raise InvalidRequest(what, field=f"tools[{at}].type", code="unsupported_parameter")
    if body.input_schema is None:
        raise InvalidRequest(f"tools[{at}].input_schema: is required", field=f"tools[{at}].input_schema")
    schema = f"tools[{at}].input_schema"
    return Tool(body.name, body.description or "", body.input_schema, bool(body.strict), schema)


class Transcript:
    """Messages and marks, made turn by turn."""

    def __init__(self, system: str | list[PlainBlock] | None) -> None:
        self.messages: list[Message] = []
        self.marks: list[tuple[int, str | None, str, CacheControl]] = []
        if system:
            self._plain("system", [PlainBlock("text", system)] if isinstance(system, str) else system, "system")

    def add(self, turn: TurnBody, field: str) -> None:
        """Appends one turn."""
        content = turn.content
        blocks = [ContentBlock(type="text", text=content)] if isinstance(content, str) else content
        if turn.role == "assistant":
            self._assistant(blocks, f"{field}.content")
        elif turn.role == "user":
            self._user(blocks, f"{field}.content")
        else:
            self._plain("system", blocks, f"{field}.content")

    def mark(self, field: str, control: CacheControl, text: str | None = None) -> None:
        """Asks that all up to here is kept; `text` is that of the last message up to here, None for all of it. Raises
        InvalidRequest for one too many."""
        check_marks(len(self.marks) + 1)
        self.marks.append((len(self.messages) - 1, text, field, control))

    def mark_tools(self, field: str, control: CacheControl) -> None:
        """Asks that the tools are kept: in a system message, where templates show them together."""
        self.marks.insert(0, (0, None if self.messages[0].role == "system" else "", field, control))

    def _plain(self, role: str, blocks: Sequence[AnyBlock], field: str) -> None:
        """One message of text blocks."""
        texts = [_text(block, f"{field}[{at}]") for at, block in enumerate(blocks)]
        self.messages.append(Message(role, "".join(texts)))
        for at, block in enumerate(blocks):
            if block.cache_control is not None:
                self.mark(f"{field}[{at}].cache_control", block.cache_control, "".join(texts[: at + 1]))

    def _user(self, blocks: Sequence[ContentBlock], field: str) -> None:
        """A message of its own for each result of a tool, and for the text between them."""
        at = 0
        while at < len(blocks):
            if blocks[at].type == "tool_result":
                self._result(blocks[at], f"{field}[{at}]")
                at += 1
                continue
            begin = at
            while at < len(blocks) and blocks[at].type != "tool_result":
                at += 1
            parts = [_shown(block, f"{field}[{begin + number}]") for number, block in enumerate(blocks[begin:at])]
            texts = [part if isinstance(part, str) else "" for part in parts]
            self.messages.append(_message("user", parts))
            for number, block in enumerate(blocks[begin:at]):
                if block.cache_control is not None:
                    place = f"{field}[{begin + number}].cache_control"
                    self.mark(place, block.cache_control, "".join(texts[: number + 1]))

    def _result(self, block: ContentBlock, field: str) -> None:
        if block.tool_use_id is None:
            raise InvalidRequest(f"{field}.tool_use_id: is required", field=f"{field}.tool_use_id")
        content = block.content or ""
        parts: list[str | PictureLink] = [_ERROR] if block.is_error else []
        if isinstance(content, str):
            parts.append(content)
        else:
            parts += (_shown(part, f"{field}.content[{at}]") for at, part in enumerate(content))
        self.messages.append(_message("tool", parts, block.tool_use_id))
        if block.cache_control is not None:
            self.mark(f"{field}.cache_control", block.cache_control)

    def _assistant(self, blocks: Sequence[ContentBlock], field: str) -> None:
        """One message: reasoning, then text, then calls, as templates expect it."""
        reasoning, content, calls = "", "", []
        marks: list[tuple[str, CacheControl, str | None]] = []
        for at, block in enumerate(blocks):
            place = f"{field}[{at}]"
            if block.type == "thinking":
                reasoning += block.thinking or ""
            elif block.type == "tool_use":
                calls.append(_call(block, place))
            elif block.type != "redacted_thinking":
                content += _text(block, place)
            if block.cache_control is not None:
                check_marks(len(self.marks) + len(marks) + 1)
                text = content if block.type == "text" else None
                marks.append((f"{place}.cache_control", block.cache_control, text))
        self.messages.append(Message("assistant", content, tuple(calls), reasoning=reasoning))
        for mark, control, text in marks:
            self.mark(mark, control, text)


def _message(role: str, parts: Sequence[str | PictureLink], call_id: str = "") -> Message:
    """Of texts and pictures."""
    texts = [part for part in parts if isinstance(part, str)]
    return Message(role, "".join(texts), call_id=call_id, parts=() if len(texts) == len(parts) else tuple(parts))


def _shown(block: ContentBlock | ShownBlock, field: str) -> str | PictureLink:
    """A text or a picture."""
    if block.type != "image":
        return _text(block, field)
    source = block.source
    if source is None or source.type != "base64" or source.media_type is None or source.data is None:
        what = f"{field}.source: must have type base64, media_type and data"
        raise InvalidRequest(what, field=f"{field}.source")
    return PictureLink(f"data:{source.media_type};base64,{source.data}", f"{field}.source")


def _text(block: AnyBlock, field: str) -> str:
    if block.type != "text":
        what = f"{field}.type: {block.type[:40]!r} is not supported here; send blocks of type text"
        raise InvalidRequest(what, field=f"{field}.type", code="unsupported_parameter")
    if block.text is None:
        raise InvalidRequest(f"{field}.text: is required", field=f"{field}.text")
    return block.text


def _call(block: ContentBlock, field: str) -> Call:
    for name in ("id", "name"):
        if not getattr(block, name):
            raise InvalidRequest(f"{field}.{name}: is required", field=f"{field}.{name}")
    value = decoded(block.input, f"{field}.input")
    try:
        # White space as in the calls that models write, so that what was generated is found in the cache.
        written = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"{field}.input: is nested too deeply", field=f"{field}.input") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field}.input: must be an object", field=f"{field}.input")
    return Call(block.id or "", block.name or "", written)
