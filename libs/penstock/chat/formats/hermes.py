"""ChatML with Hermes calls: Qwen 2.5 and 3, and the embedded model.

<think>reasoning</think>content
<tool_call>
{"name": "f", "arguments": {...}}
</tool_call>
"""

from __future__ import annotations

from penstock.chat.formats.format import ToolFormat, WrittenCalls
from penstock.chat.formats.pattern import Slot

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _recognised(template: str) -> bool:
    # Others write <tool_call> too, with XML or a bare name inside.
    return OPEN in template and not any(other in template for other in ("<function=", "<arg_key>"))


HERMES = ToolFormat(
    name="hermes",
    heads=((OPEN, "{", '"name"', ":", Slot.STRING, ",", '"arguments"', ":"),),
    tails=(("}", CLOSE),),
    written=WrittenCalls(before=OPEN + '\n{"name": "', behind='", "arguments": ', after="}\n" + CLOSE, between="\n"),
    markers=(OPEN, CLOSE),
    recognised=_recognised,
)
