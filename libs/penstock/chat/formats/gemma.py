"""Gemma: the calls of Gemma 4, and the ```tool_code blocks that Gemma 3 is asked for.

    <|channel>thought
    reasoning<channel|>content<|tool_call>call:f{city:<|"|>Oslo<|"|>,days:3}<tool_call|>

    ```tool_code
    f(city="Oslo", days=3)
    ```

The template that Gemma 3 comes with shows no tools; a template that does asks for the block, as Google's guide has it.
"""

from __future__ import annotations

from typing import ClassVar

from penstock.chat.formats.arguments import in_json_string
from penstock.chat.formats.format import ReasoningMarkers, ToolFormat, WrittenCalls
from penstock.chat.formats.pattern import SPACE, Slot
from penstock.chat.formats.python import PythonArguments

OPEN, CLOSE = "<|tool_call>", "<tool_call|>"
QUOTE = '<|"|>'
BLOCK, BLOCK_END = "```tool_code", "```"


class GemmaArguments:
    """`{key:<|"|>text<|"|>,other:[1,true]}`, given on as a JSON object."""

    opening: ClassVar[str] = "{"

    def __init__(self) -> None:
        self.done = False
        self._closing: list[str] = []
        self._key = False
        """Whether the next text outside of quotes is a key."""
        self._key_open = False
        self._quoted = False
        self._held = ""

    def read(self, text: str, at: int) -> tuple[str, int]:
        """See `Arguments`."""
        pieces: list[str] = []
        while at < len(text) and not self.done:
            letter = text[at]
            if letter == QUOTE[len(self._held)]:
                self._held += letter
                if self._held == QUOTE:
                    self._held = ""
                    self._quoted = not self._quoted
                    pieces.append(self._unkeyed() + '"')
                    self._key = False
            elif self._held:
                held, self._held = self._held, ""
                pieces.append("".join(map(self._plain, held)))
                continue
            else:
                pieces.append(self._plain(letter))
            at += 1
        return "".join(pieces), at

    def _plain(self, letter: str) -> str:
        if self._quoted:
            return in_json_string(letter)
        if letter in "{[":
            self._closing.append("}" if letter == "{" else "]")
            self._key = letter == "{"
            return letter
        if letter in "}]":
            out = self._unkeyed() + self._closing.pop()
            self.done = not self._closing
            return out
        if letter == ",":
            self._key = self._closing[-1] == "}"
            return self._unkeyed() + ", "
        if letter == ":":
            return self._unkeyed() + ": "
        if letter in SPACE:
            return ""
        begins = self._key
        self._key, self._key_open = False, self._key_open or begins
        return ('"' if begins else "") + in_json_string(letter)

    def _unkeyed(self) -> str:
        """The quote that ends a bare key, if one is open."""
        closes, self._key_open = self._key_open, False
        return '"' if closes else ""


GEMMA = ToolFormat(
    name="gemma",
    heads=((OPEN, "call:", Slot.NAME),),
    tails=((CLOSE,),),
    arguments=GemmaArguments,
    written=WrittenCalls(before=OPEN + "call:", after=CLOSE),
    values="gemma",
    markers=(OPEN, CLOSE, QUOTE),
    reasoning=ReasoningMarkers("<|channel>thought\n", "<channel|>"),
    recognised=lambda template: OPEN in template,
)

GEMMA_TOOL_CODE = ToolFormat(
    name="gemma-tool-code",
    heads=((BLOCK, Slot.NAME),),
    nexts=((Slot.NAME,),),
    tails=((BLOCK_END,),),
    arguments=PythonArguments,
    opening="(",
    written=WrittenCalls(begin=BLOCK + "\n", before="", behind="(", after=")", between="\n", end="\n" + BLOCK_END),
    values="python",
    recognised=lambda template: BLOCK in template,
)
