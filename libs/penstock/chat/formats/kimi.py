"""Kimi K2: a section of calls, each with the id that the model gives it.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    <|tool_calls_section_end|>

The template shows calls by their ids only, so that clients get the ids that the model wrote.
"""

from __future__ import annotations

from penstock.chat.formats.format import ToolFormat, WrittenCalls
from penstock.chat.formats.pattern import Pattern, Slot

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENT, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_CALL: Pattern = (CALL, "functions.", Slot.NAME, ":", Slot.ID, ARGUMENT)

KIMI = ToolFormat(
    name="kimi",
    heads=((BEGIN, *_CALL),),
    nexts=((CALL_END, *_CALL),),
    tails=((CALL_END, END),),
    written=WrittenCalls(
        begin=BEGIN, before=CALL + "functions.", number=True, behind=ARGUMENT, after=CALL_END, end=END
    ),
    markers=(BEGIN, END, CALL, ARGUMENT, CALL_END),
    call_id=lambda name, given, drawn: f"functions.{name}:{given}",
    recognised=lambda template: CALL in template,
)
