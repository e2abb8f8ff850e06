"""Prompt text to token ids, at a cost that grows with what is new.

Control tokens that a *client* wrote (in a message, a tool's description, a tool's result) are text, not control:
`Marker` puts a noncharacter behind the first letter of each before the template sees it, and `encode` splits there, so
that no token can span it. What the template itself writes stays a control token.

`Encoded` remembers where the text may be cut: at an added token that absorbs no white space, everything before it is
tokenized without a look at what follows. A text that shares its beginning with an earlier one keeps the earlier ids up
to the last cut that they share; the result equals a tokenization from scratch, which a test holds for random splits,
unless the earlier ids are those of a generated answer (see `sessions`).
"""

from __future__ import annotations

import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, NamedTuple

from tokenizers import Tokenizer

SPLIT = "\ufdd0"
_REPLACEMENT = "\ufffd"
_BATCH = 256
"""Pieces that are tokenized in one call."""
_SLICE = 1 << 16
"""Characters that are searched in one call: a search keeps Python's global lock until it finds something."""
_GROUP = 1 << 13
"""Parts between marks that are joined in one call."""
_WINDOWS = 8
"""Slices that are tokenized in one call, to see whether a text is far too long."""
_FAR = 4
"""Characters per token that fits, beyond which a text may be far too long."""


class Cut(NamedTuple):
    """A place where a text may be cut: right before an added token."""

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
    cuts: Sequence[Cut] = field(default=(), compare=False)
    """Places where it may be cut, in order: the last one, and those where earlier prompts of its session ended."""
    reused: int = field(default=0, compare=False)
    """Leading ids that were taken from an earlier prompt."""

    def shared(self, text: str) -> Sequence[Cut]:
        """The leading cuts that `text` has too, with all before them."""
        if not self.cuts or text.startswith(self.text[: self.cuts[-1].through]):
            return self.cuts
        common = common_prefix(text, self.text)
        return self.cuts[: bisect_right(self.cuts, common, key=lambda cut: cut.through)]


class TooManyTokens(Exception):
    """A text has more tokens than the caller can use; `tokens` of them were found before the rest was left alone."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"{tokens} tokens or more")
        self.tokens = tokens


class PromptEncoder:
    """Encodes prompts of one tokenizer. Stateless: safe to use from several threads.

    Everything goes through `encode_batch_fast`, also a single text: `Tokenizer.encode` keeps Python's global lock for
    as long as it works, so that a long prompt would stop every other thread, and the event loop with them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.cut_texts = _cut_tokens(tokenizer)
        """The added tokens at which a text may be cut, with their texts."""

    def at_least(self, text: str) -> int:
        """A lower bound of the tokens in `text`, found without tokenizing it."""
        return len(text) // self._longest

    @cached_property
    def _longest(self) -> int:
        longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        # A normalizer may drop characters; none in use drops three of four.
        return longest if self._tokenizer.normalizer is None else 4 * longest

    def encode_raw(self, text: str, *, most: int = sys.maxsize) -> array[int]:
        """The ids of a text of the client's own making, control tokens included. Raises TooManyTokens.

        What the model's tokenizer puts around every text, by its post-processor, is put there: for most Llama, Mistral
        and Gemma a BOS in front. Rendered conversations get nothing, their template writes it.
        """
        self._check_far_too_long(text, Cut(0, 0, 0), most)
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=True)
        if len(encoding) > most:
            raise TooManyTokens(len(encoding))
        return array("I", encoding.ids)

    def encode(self, text: str, earlier: Encoded | None = None, *, most: int = sys.maxsize) -> Encoded:
        """The ids of a rendered, marked `text`; `earlier` is a prompt that it may continue.

        Raises TooManyTokens as soon as more than `most` ids are certain.
        """
        cuts = () if earlier is None else tuple(earlier.shared(text))
        begun = cuts[-1] if cuts else Cut(0, 0, 0)
        ids: array[int] = array("I") if earlier is None else earlier.ids[: begun.ids]
        last: Cut | None = None
        self._check_far_too_long(text, begun, most)
        for batch in _batches(_pieces(text, begun.chars)):
            pieces = [text[begin:end] for begin, end in batch]
            encodings = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
            for (begin, _), piece, encoding in zip(batch, pieces, encodings, strict=True):
                start = len(ids)
                if start + len(encoding) > most:
                    raise TooManyTokens(start + len(encoding))
                ids.extend(encoding.ids)
                last = self._last_cut(piece, ids, start, begin) or last
        if last is not None and last != begun:
            cuts = (*cuts, last)
        return Encoded(text, ids, cuts, begun.ids)

    def _check_far_too_long(self, text: str, begun: Cut, most: int) -> None:
        """Raises TooManyTokens for a text that has far more than `most` tokens, without tokenizing all of it.

        The tokens of one call are freed at once, under the lock: of millions that takes longer than others may wait.
        """
        room = most - begun.ids
        if len(text) - begun.chars <= _FAR * room:
            return
        windows = iter(range(begun.chars, len(text), _SLICE))
        found = 0
        while batch := list(islice(windows, _WINDOWS)):
            pieces = [text[begin : begin + _SLICE] for begin in batch]
            found += sum(map(len, self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)))
            if found > 2 * room:  # a cut in the middle of a token makes more of it, though never twice as many in all
                raise TooManyTokens(begun.ids + found // 2 + 1)

    def _last_cut(self, piece: str, ids: array[int], start: int, begin: int) -> Cut | None:
        """The last cut of `piece`, whose ids begin at `start` and whose characters begin at `begin`."""
        for at in range(len(ids) - 1, start - 1, -1):
            content = self.cut_texts.get(ids[at])
            if content is not None:
                found = begin + piece.rindex(content)
                return Cut(found, at, found + len(content))
        return None


def _cut_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """The added tokens at which a text may be cut, with their texts.

    Such a token absorbs no white space, and none of its occurrences can be covered by another token, or by another
    occurrence of itself: so the last id of it in a text is the last occurrence of its text.
    """
    added = tokenizer.get_added_tokens_decoder()
    texts = {what.content for what in added.values()}
    return {
        token: what.content
        for token, what in added.items()
        if not (what.lstrip or what.rstrip or what.single_word or what.normalized)
        and what.content == what.content.strip() != ""
        and not any(_may_cover(text, what.content) for text in texts)
    }


def _may_cover(text: str, content: str) -> bool:
    """Whether a match of `text` that begins where `content` does, or before, can take characters of it."""
    if text != content and content in text:
        return True
    return any(content.startswith(text[at:]) for at in range(1, len(text)))


def common_prefix(one: str | array[int], other: str | array[int]) -> int:
    """Number of leading items that are equal, found by halving, since slices compare far faster than items."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _pieces(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Where the parts between split marks begin and end, from `at` on."""
    while (end := text.find(SPLIT, at)) >= 0:
        yield at, end
        at = end + len(SPLIT)
    yield at, len(text)


def _batches(pieces: Iterator[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The pieces in groups: one call for each of a million pieces takes too long, one call for all of them too."""
    while batch := list(islice(pieces, _BATCH)):
        yield batch


class Marker:
    """Makes control tokens in client text harmless."""

    def __init__(self, tokens: Collection[str]) -> None:
        """`tokens` are the texts of control tokens."""
        longest = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
        self._find = re.compile("|".join(re.escape(token) for token in longest)) if longest else None
        self._reach = len(longest[0]) - 1 if longest else 0

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
        splits = [found + 1 for found in self._tokens(self._find, text)]
        if not splits:
            return text
        parts = pairwise([0, *splits, len(text)])
        groups = []
        while group := list(islice(parts, _GROUP)):  # a million strings at once are long freed, under the lock
            groups.append(SPLIT.join([text[begin:end] for begin, end in group]))
        return SPLIT.join(groups)

    def _tokens(self, find: re.Pattern[str], text: str) -> Iterator[int]:
        """Where control tokens begin; each search sees one slice, and as much more as a token may reach beyond it."""
        at = 0
        while at < len(text):
            stop = at + _SLICE
            for found in find.finditer(text, at, stop + self._reach):
                if found.start() >= stop:
                    break
                yield found.start()
                at = found.end()
            at = max(at, stop)
