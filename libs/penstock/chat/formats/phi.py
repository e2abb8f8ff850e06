"""Phi 4 mini: <|tool_call|>[{"name": "f", "arguments": {...}}]<|/tool_call|>, with or without the list."""

from __future__ import annotations

from penstock.chat.formats.format import ToolFormat, WrittenCalls
from penstock.chat.formats.pattern import Pattern, Slot

OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"

_CALL: Pattern = ("{", '"name"', ":", Slot.STRING, ",", '"arguments"', ":")

PHI = ToolFormat(
    name="phi",
    heads=((OPEN, "[", *_CALL), (OPEN, *_CALL)),
    nexts=(("}", ",", *_CALL),),
    tails=(("}", "]", CLOSE), ("}", CLOSE)),
    written=WrittenCalls(
        begin=OPEN + "[", before='{"name": "', behind='", "arguments": ', after="}", between=", ", end="]" + CLOSE
    ),
    markers=(OPEN, CLOSE),
    recognised=lambda template: CLOSE in template or "<|/tool|>" in template,
)
