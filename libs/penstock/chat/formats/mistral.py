"""Mistral: a list of calls behind [TOOL_CALLS], or one marker for each call.

    [TOOL_CALLS] [{"name": "f", "arguments": {...}, "id": "a1B2c3D4e"}]

    [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}

Both templates want call ids of nine letters and digits.
"""

from __future__ import annotations

import string

from penstock.chat.formats.format import ReasoningMarkers, ToolFormat, WrittenCalls
from penstock.chat.formats.pattern import Pattern, Slot

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


def _call_id(name: str, given: str, drawn: bytes) -> str:
    if len(given) == _ID_LENGTH and given.isascii() and given.isalnum():
        return given
    number = int.from_bytes(drawn)
    return "".join(_LETTERS[number // len(_LETTERS) ** at % len(_LETTERS)] for at in range(_ID_LENGTH))


_CALL: Pattern = ("{", '"name"', ":", Slot.STRING, ",", '"arguments"', ":")
_ENDS: tuple[Pattern, ...] = (("}",), (",", '"id"', ":", Slot.SKIPPED, "}"))
_REASONING = ReasoningMarkers("[THINK]", "[/THINK]")

MISTRAL_LIST = ToolFormat(
    name="mistral-list",
    heads=((OPEN, "[", *_CALL),),
    nexts=tuple((*end, ",", *_CALL) for end in _ENDS),
    tails=tuple((*end, "]") for end in _ENDS),
    written=WrittenCalls(
        begin=OPEN + " [", before='{"name": "', behind='", "arguments": ', after="}", between=", ", end="]"
    ),
    markers=(OPEN,),
    reasoning=_REASONING,
    call_id=_call_id,
    recognised=lambda template: OPEN in template and ARGS not in template,
)

MISTRAL = ToolFormat(
    name="mistral",
    heads=((OPEN, Slot.NAME, ARGS), (OPEN, Slot.NAME, CALL_ID, Slot.ID, ARGS)),
    tails=((),),
    written=WrittenCalls(before=OPEN, behind=ARGS),
    markers=(OPEN, ARGS, CALL_ID),
    reasoning=_REASONING,
    call_id=_call_id,
    recognised=lambda template: OPEN in template and ARGS in template,
)
