"""Prompt text to token ids, at a cost that grows with what is new.

Control tokens that a *client* wrote (in a message, a tool's description, a tool's result) are text, not control:
`Marker` puts a noncharacter behind the first letter of each before the template sees it, and `encode` splits there, so
that no token can span it. What the template itself writes stays a control token.

`Encoded` remembers where the text may be cut: at an added token that absorbs no white space, everything before it is
tokenized without a look at what follows. A longer text that begins with an earlier one keeps the earlier ids up to
the last such cut; the result equals a tokenization from scratch, which a test holds for random splits.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import Tokenizer

SPLIT = "\ufdd0"
_REPLACEMENT = "\ufffd"


class Cut(NamedTuple):
    """The last place where a text may be cut: right before an added token."""

    chars: int
    ids: int
    through: int
    """Characters up to the end of that token: another text can be cut here too when it shares these."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt's text and ids."""

    text: str
    """As rendered, with split marks."""
    ids: array[int]
    cut: Cut
    reused: int = field(default=0, compare=False)
    """Leading ids that were taken from an earlier prompt."""


class PromptEncoder:
    """Encodes prompts of one tokenizer. Stateless: safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._cuts = frozenset(
            token
            for token, what in added.items()
            if not (what.lstrip or what.rstrip or what.single_word or what.normalized)
        )

    def at_least(self, text: str) -> int:
        """A number of tokens that `text` has at least, found without tokenizing it."""
        return len(text) // self._longest

    @cached_property
    def _longest(self) -> int:
        longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        # A normalizer may drop characters; none in use drops three of four.
        return longest if self._tokenizer.normalizer is None else 4 * longest

    def encode_raw(self, text: str) -> array[int]:
        """The ids of a text of the client's own making, control tokens included."""
        return array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str, earlier: Encoded | None = None) -> Encoded:
        """The ids of a rendered, marked `text`; `earlier` is a prompt that it may continue."""
        cut = Cut(0, 0, 0)
        ids: array[int] = array("I")
        if earlier is not None and text.startswith(earlier.text[: earlier.cut.through]):
            cut = earlier.cut
            ids = earlier.ids[: cut.ids]
        at, reused = cut.chars, cut.ids
        for piece in text[at:].split(SPLIT):
            encoding = self._tokenizer.encode(piece, add_special_tokens=False)
            start = len(ids)
            ids.extend(encoding.ids)
            last = self._last_cut(ids, start)
            if last is not None:
                # Of one token: `encoding.offsets` would build a list of all, and hold up every thread meanwhile.
                begin, end = encoding.token_to_chars(last - start) or (0, 0)
                cut = Cut(at + begin, last, at + end)
            at += len(piece) + len(SPLIT)
        return Encoded(text, ids, cut, reused)

    def _last_cut(self, ids: Sequence[int], start: int) -> int | None:
        for at in range(len(ids) - 1, start - 1, -1):
            if ids[at] in self._cuts:
                return at
        return None


class Marker:
    """Makes control tokens in client text harmless."""

    def __init__(self, tokens: Collection[str]) -> None:
        """`tokens` are the texts of control tokens."""
        longest = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
        self._find = re.compile("|".join(re.escape(token) for token in longest)) if longest else None

    def mark(self, value: Any) -> Any:
        """`value` with marks in every string, mapping keys, mapping values and list items included."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        return value

    def _mark_text(self, text: str) -> str:
        if self._find is None:
            return text
        if SPLIT in text:
            text = text.replace(SPLIT, _REPLACEMENT)
        return self._find.sub(lambda found: found[0][0] + SPLIT + found[0][1:], text)
