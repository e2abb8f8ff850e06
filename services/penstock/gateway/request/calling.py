"""Which tools a model may call, or must, as every API asks for it in words of its own."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.chat.messages import Tool
from penstock.errors import InvalidRequest
from penstock.gateway.request import bounds
from penstock.gateway.request.bounds import check_count

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Calling:
    """The calls that an answer may hold."""

    tools: tuple[Tool, ...]
    """Functions that may be called, at least one."""
    required: bool = False
    """Whether the answer must be a call."""
    parallel: bool = True
    """Whether the answer may hold more than one call."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions that may be called."""
        return frozenset(tool.name for tool in self.tools)


def check_tools(tools: Sequence[Tool], field: str = "tools[{at}].function.name") -> None:
    """Raises InvalidRequest for too many tools, or a name that not every model can write. `field` is where a name
    stands in the client's API."""
    check_count("tools", len(tools), bounds.MAX_TOOLS)
    for number, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name):
            where = field.format(at=number)
            raise InvalidRequest(
                f"{where}: must have 1 to 128 characters, which may be letters, digits, _, - and .", field=where
            )


def calling(
    tools: Sequence[Tool], mode: str, only: Collection[str] | None = None, *, parallel: bool = True
) -> Calling | None:
    """What may be called. `mode` is auto, none, required or named; `only`: the tools that the client's choice names.

    None: no calls. Raises InvalidRequest when the client's choice names a tool that it has not sent.
    """
    names = frozenset(tool.name for tool in tools)
    if only is not None:
        for name in only:
            if name not in names:
                raise InvalidRequest(f"tool_choice: {name[:64]!r} is not among the tools", field="tool_choice")
        names = frozenset(only)
    if mode == "none":
        return None
    if mode in ("required", "named") and not names:
        raise InvalidRequest("tool_choice: requires tools", field="tool_choice")
    if not names:
        return None
    offered = tuple(tool for tool in tools if tool.name in names)
    return Calling(offered, mode in ("required", "named"), parallel and mode != "named")
