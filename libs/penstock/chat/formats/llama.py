"""Llama 3 and 4: calls as JSON, or as a list of Python calls.

    {"name": "f", "parameters": {...}}

    [f(city="Oslo"), g(days=3)]

No marker says that a call begins, so that calls come only at the beginning of an answer, or behind another call;
<|python_tag|> may stand in front of them, which as a special token has no text. Several JSON calls have a semicolon
between them.
"""

from __future__ import annotations

from penstock.chat.formats.format import ToolFormat, WrittenCalls
from penstock.chat.formats.pattern import Pattern, Slot
from penstock.chat.formats.python import PythonArguments

TAG, START = "<|python_tag|>", "<|python_start|>"

_PLAIN: Pattern = ("{", '"name"', ":", Slot.STRING, ",", '"parameters"', ":")
_TYPED: Pattern = ("{", '"type"', ":", '"function"', ",", *_PLAIN[1:])
_FIRST = (_PLAIN, _TYPED)

LLAMA_JSON = ToolFormat(
    name="llama-json",
    heads=tuple((*before, *call) for before in ((), (TAG,), (";",), (";", TAG)) for call in _FIRST),
    tails=(("}",),),
    leads=True,
    written=WrittenCalls(before='{"name": "', behind='", "parameters": ', after="}", between=None),
    recognised=lambda template: '"parameters": ' in template and '{"name": ' in template,
)

LLAMA_PYTHONIC = ToolFormat(
    name="llama-pythonic",
    heads=tuple((*before, "[", Slot.NAME) for before in ((), (TAG,), (START,))),
    nexts=((",", Slot.NAME),),
    tails=(("]",),),
    arguments=PythonArguments,
    opening="(",
    leads=True,
    written=WrittenCalls(begin="[", before="", behind="(", after=")", between=", ", end="]"),
    values="python",
    recognised=lambda template: "[func_name1(" in template,
)
