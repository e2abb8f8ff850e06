"""The tools of a chat request, and what its tool_choice says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.chat.messages import Tool
from penstock.errors import InvalidRequest
from penstock.gateway.api.openai.bodies import ChatBody, FunctionBody, ToolBody
from penstock.gateway.request.calling import Calling, calling, check_tools

_MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
_CHOICE = msgspec.json.Decoder(str | dict[str, Any] | None)


def tools_of(body: ChatBody) -> tuple[tuple[Tool, ...], Calling | None]:
    """The tools to show, and what may be called. Raises InvalidRequest naming the field."""
    tools = shown_tools(body.tools or ())
    mode, only = tool_choice(bytes(body.tool_choice))
    return tools, calling(tools, mode, only, parallel=body.parallel_tool_calls is not False)


def shown_tools(bodies: Sequence[ToolBody]) -> tuple[Tool, ...]:
    """The tools to show. Raises InvalidRequest naming the field."""
    tools = tuple(_tool(item.function, at) for at, item in enumerate(bodies))
    check_tools(tools)
    return tools


def _tool(function: FunctionBody, at: int) -> Tool:
    described = function.description or ""
    where = f"tools[{at}].function.parameters"
    return Tool(function.name, described, function.parameters or {}, bool(function.strict), where)


def tool_choice(raw: bytes) -> tuple[str, Sequence[str] | None]:
    """The mode of a tool_choice, and the functions that it names. Raises InvalidRequest."""
    try:
        choice = _CHOICE.decode(raw or b"null")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _malformed() from None
    if choice is None:
        return "auto", None
    kind = choice if isinstance(choice, str) else choice.get("type")
    if isinstance(kind, str) and kind in _MODES:
        return _MODES[kind], None
    if not isinstance(choice, dict):
        raise _malformed()
    if kind == "function":
        return "named", [_name(choice)]
    if kind == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        mode = inner.get("mode") if isinstance(inner, dict) else None
        if isinstance(mode, str) and mode in _MODES and isinstance(inner.get("tools"), list):
            return _MODES[mode], [_name(entry) for entry in inner["tools"]]
    raise _malformed()


def _name(choice: object) -> str:
    """The name of a function that a choice names: inside of `function`, or beside the type."""
    inner = choice.get("function", choice) if isinstance(choice, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        raise _malformed()
    return name


def _malformed() -> InvalidRequest:
    what = 'must be "auto", "none", "required", {"type": "function", "function": {"name": ...}} or allowed_tools'
    return InvalidRequest(f"tool_choice: {what}", field="tool_choice")
