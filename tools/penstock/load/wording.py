"""Text that is about so many tokens long, and the same for the same seed; and definitions of tools."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

WORDS = tuple(Path(__file__).with_name("words.txt").read_text(encoding="ascii").split())
"""One for each value of a byte."""
_TOOLS = ("read_file", "write_file", "edit_file", "run_command", "search_text", "list_files", "fetch_page", "plan_work")
_PARAMETERS = {
    "type": "object",
    "properties": {"target": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["target"],
}
FIRST_ID = 300
"""No prompt has ids of tokens below: bytes and special ones are among them."""
_ID_BYTES = 4
_TOOL_WORDS = 150
"""Of a whole description: agents' tools are described at length."""


class Wording(msgspec.Struct, frozen=True, kw_only=True):
    """How long text is in the tokens of a server's model; see `target.calibrated`."""

    salt: str
    """Text is the same for the same seed and salt. Each round of a run has its own, so that none meets the text of an
    earlier one in a cache."""
    words_per_token: float = 0.75
    guessed: bool = False
    """Whether that is a guess, as the server does not say how long prompts are."""
    tool_tokens: float | None = None
    """Of a definition of a tool with an empty description; None: the server does not tell its model of tools."""
    vocab: int = 0
    """Ids of tokens are drawn below it, where prompts are made of those."""

    def count(self, tokens: float) -> int:
        """Words that are about so many tokens."""
        return round(tokens * self.words_per_token)

    def words(self, seed: str, tokens: float) -> list[str]:
        """Words for so many tokens, one at least."""
        return self._drawn(seed, max(1, self.count(tokens)))

    def text(self, seed: str, tokens: float) -> str:
        """The same as one text."""
        return " ".join(self.words(seed, tokens))

    def blocks(self, seeds: Sequence[str], tokens: int, first: int = 0) -> list[str]:
        """The words of blocks of `tokens` tokens that follow each other, the first of them `first` in its prompt.
        Those of a block depend on its seed and place alone, and many blocks together are as long as they should be."""
        ends = [self.count(tokens * (first + number)) for number in range(len(seeds) + 1)]
        return [
            word
            for seed, begin, end in zip(seeds, ends, ends[1:], strict=False)
            for word in self._drawn(seed, max(1, end - begin))
        ]

    def tools(self, tokens: int) -> list[dict[str, Any]]:
        """Definitions of tools that are about so many tokens together: the first ones of a list that never ends. None
        where the server does not tell its model of tools."""
        if self.tool_tokens is None or tokens <= 0:
            return []
        whole = self.tool_tokens + _TOOL_WORDS / self.words_per_token
        count, rest = divmod(tokens, whole)
        sizes = [_TOOL_WORDS] * int(count)
        if rest > self.tool_tokens or not sizes:
            sizes.append(max(1, self.count(rest - self.tool_tokens)))
        return [self.tool(number, words) for number, words in enumerate(sizes)]

    def tool(self, number: int, words: int) -> dict[str, Any]:
        """One definition."""
        again, which = divmod(number, len(_TOOLS))
        name = f"{_TOOLS[which]}_{again}" if again else _TOOLS[which]
        description = " ".join(self._drawn(f"tool/{number}", words)) if words else ""
        function = {"name": name, "description": description, "parameters": _PARAMETERS}
        return {"type": "function", "function": function}

    def ids(self, seed: str, count: int) -> list[int]:
        """So many ids of tokens."""
        digest = hashlib.shake_128(f"{self.salt}/{seed}".encode()).digest(_ID_BYTES * count)
        return [FIRST_ID + value % (self.vocab - FIRST_ID) for value in memoryview(digest).cast("I")]

    def _drawn(self, seed: str, count: int) -> list[str]:
        digest = hashlib.shake_128(f"{self.salt}/{seed}".encode()).digest(count)
        return [WORDS[value] for value in digest]
