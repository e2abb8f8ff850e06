"""Lines at the head of a system prompt that change from request to request, and take the prefix with them.

Some agents begin their system prompt with the time, a digest of the request or a random id. Everything behind such a
line is then new with every request, and nothing of the conversation is found in the cache. An operator may have these
lines moved behind the rest of the system prompt, or dropped. It is off by default: the prompt is the client's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from penstock.chat.messages import Message
from penstock.gateway.request.ask import Conversation

MODES = ("keep", "move", "drop")
HEAD_LINES = 20
"""Lines at the head of a system prompt in which volatile ones are looked for."""
_LONGEST = 400
"""Characters of a line; a longer one holds instructions."""
_KNOWN = (
    r"x-[a-z0-9-]+: .*",  # a header in the prompt, such as a billing header with a digest of the request
    r"(?:the )?(?:current|today's) (?:date|time|date and time|datetime)(?: is|:).*",
    r"today is .*\d.*",
    r"(?:date|time|now|timestamp): .*\d.*",
    r"(?:current )?(?:request|session|conversation|trace|run|message)[ _-]?id(?: is|:|=)\W*\S+",
    r"(?:nonce|random seed|uuid): ?\S+",
)


class VolatileLines:
    """Finds such lines, and does with them what the operator wants."""

    def __init__(self, mode: str, pattern: str = "") -> None:
        """`mode` is one of MODES; `pattern` is another regular expression for whole lines. Raises re.error."""
        known = "|".join(f"(?:{each})" for each in (*_KNOWN, *((pattern,) if pattern else ())))
        self._mode = mode
        self._line = re.compile(rf"\W*(?:{known})\W*", re.IGNORECASE)

    def steady(self, prompt: Conversation) -> Conversation:
        """The prompt with its volatile lines out of the way, in what is to be kept too."""
        if self._mode == "keep" or not prompt.messages or prompt.messages[0].role != "system":
            return prompt
        keeps = [replace(keep, upto=self._messages(keep.upto)) for keep in prompt.keeps]
        return replace(prompt, messages=self._messages(prompt.messages), keeps=keeps)

    def _messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not messages:
            return messages
        return [replace(messages[0], content=self._text(messages[0].content)), *messages[1:]]

    def _text(self, text: str) -> str:
        lines = text.split("\n", HEAD_LINES)
        head, rest = lines[:HEAD_LINES], lines[HEAD_LINES:]
        volatile = [line for line in head if self._is(line)]
        if not volatile:
            return text
        kept = [line for line in head if not self._is(line)]
        return "\n".join([*kept, *rest, *(volatile if self._mode == "move" else ())])

    def _is(self, line: str) -> bool:
        return 0 < len(line) <= _LONGEST and self._line.fullmatch(line) is not None
