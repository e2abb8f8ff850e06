"""DeepSeek: a section of calls. V3 and R1 name the kind of call and fence the arguments; V3.1 has them bare.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{...}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from penstock.chat.formats.format import ToolFormat, WrittenCalls
from penstock.chat.formats.pattern import Pattern, Slot

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

_FENCED: Pattern = (CALL, "function", SEPARATOR, Slot.NAME, "```json")
_BARE: Pattern = (CALL, Slot.NAME, SEPARATOR)
_MARKERS = (BEGIN, END, CALL, SEPARATOR, CALL_END)

DEEPSEEK_FENCED = ToolFormat(
    name="deepseek-r1",
    heads=((BEGIN, *_FENCED),),
    nexts=(("```", CALL_END, *_FENCED),),
    tails=(("```", CALL_END, END),),
    written=WrittenCalls(
        begin=BEGIN,
        before=CALL + "function" + SEPARATOR,
        behind="\n```json\n",
        after="\n```" + CALL_END,
        between="\n",
        end=END,
    ),
    markers=_MARKERS,
    recognised=lambda template: CALL in template and "```json" in template,
)

DEEPSEEK_BARE = ToolFormat(
    name="deepseek-v3.1",
    heads=((BEGIN, *_BARE),),
    nexts=((CALL_END, *_BARE),),
    tails=((CALL_END, END),),
    written=WrittenCalls(begin=BEGIN, before=CALL, behind=SEPARATOR, after=CALL_END, end=END),
    markers=_MARKERS,
    recognised=lambda template: CALL in template and "```json" not in template,
)
