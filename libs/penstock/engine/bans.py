"""Texts that an answer must not have as words of their own, whatever tokens write them.

Which tokens are banned is a function of the text before: those with such a word in them, and those that would complete
one which the text has begun. So it is the same for every worker and for drafts, and holds wherever the answer is cut.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from penstock.engine.errors import RequestRefused
from penstock.engine.request import SamplingParams
from penstock.grammar.joining import joins, last_joins
from penstock.grammar.tokenizer import GrammarTokenizer
from penstock.grammar.vocabulary import Vocabulary

_MOST_KEPT = 1 << 18
"""Tokens in the sets that are kept for one list of words; the last one stays however large it is."""
_MOST_LISTS = 32
_LETTER = 4
"""Bytes of a character at most."""


@dataclass(frozen=True, slots=True)
class _Word:
    text: bytes
    before: bool
    """Whether it counts only where nothing joins it before; `behind` as well."""
    behind: bool


class WordBans:
    """What one list of words bans, of one vocabulary. Any thread may use it."""

    def __init__(self, words: Sequence[str], always: frozenset[int], vocabulary: Vocabulary) -> None:
        """`always` are banned whatever the text is."""
        self._vocabulary = vocabulary
        self._words = [
            _Word(word.encode(), joins(word[0]), joins(word[-1])) for word in sorted({*words}, key=str.encode)
        ]
        self._texts = [word.text for word in self._words]
        self._first = frozenset(text[0] for text in self._texts)
        self._longest = max(map(len, self._texts))
        self._longest_token = max(map(len, vocabulary.texts), default=0)
        held = [vocabulary.holding(word.text, before=word.before, behind=word.behind) for word in self._words]
        named = [vocabulary.controls[text] for text in self._texts if text in vocabulary.controls]
        self._always = np.unique(np.concatenate([*held, np.array([*always, *named], dtype=np.int64)]))
        self._always_set = frozenset(self._always.tolist())
        self._kept: OrderedDict[tuple[bytes, bool], frozenset[int]] = OrderedDict()
        """By state of the text, the last used behind the others."""
        self._keeping = Lock()

    def after(self, tokens: Sequence[int], begin: int, drafts: Sequence[int] = ()) -> frozenset[int]:
        """The tokens that can't follow the text of `tokens` from `begin` on and of `drafts`; none where nothing else
        could follow. The same set again for the same state of the text."""
        text = self._end(tokens, begin, drafts)
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first and self._going_on(text[at:]):
                return self._banned(text[at:], last_joins(text[max(0, at - _LETTER) : at]))
        return self._banned(b"", last_joins(text[-_LETTER:]))

    def _end(self, tokens: Sequence[int], begin: int, drafts: Sequence[int]) -> bytes:
        """The end of the text, as far as it matters: where a word may have begun, and a character before it."""
        texts, pieces, size = self._vocabulary.texts, list[bytes](), 0
        for some, first in ((drafts, 0), (tokens, begin)):
            at = len(some)
            while at > first and size < self._longest + _LETTER:
                at -= 1
                pieces.append(texts[some[at]])
                size += len(pieces[-1])
        return b"".join(reversed(pieces))

    def _going_on(self, begun: bytes) -> Sequence[_Word]:
        """The words that begin so and are longer."""
        low = bisect_left(self._texts, begun)
        high = bisect_left(self._texts, begun + b"\xff", low)
        return [word for word in self._words[low:high] if len(word.text) > len(begun)]

    def _banned(self, begun: bytes, joined: bool) -> frozenset[int]:
        """The tokens that can't follow `begun`, the longest end of the text with which a word begins; `joined`: what
        stands before it joins it."""
        state = begun, joined
        with self._keeping:
            if state in self._kept:
                self._kept.move_to_end(state)
                return self._kept[state]
        banned = self._behind(begun, joined)
        with self._keeping:
            self._kept[state] = banned
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return banned

    def _behind(self, begun: bytes, joined: bool) -> frozenset[int]:
        rests: dict[tuple[bytes, bool], None] = {}
        """What would complete a word, in one token."""
        for at in range(len(begun) + 1):
            joined = last_joins(begun[max(0, at - _LETTER) : at]) if at else joined
            for word in self._going_on(begun[at:]):
                rest = word.text[len(begun) - at :]
                if len(rest) <= self._longest_token and not (word.before and joined):
                    rests[rest, word.behind] = None
        found = [self._vocabulary.beginning(rest, behind=behind) for rest, behind in rests]
        banned = self._always_set.union(*(some.tolist() for some in found))
        return banned if len(banned) < len(self._vocabulary.texts) else frozenset()


class RequestBans:
    """Makes what requests ban, for one model, and keeps the last ones. Belongs to one event loop, which it never
    holds."""

    def __init__(self, load: Callable[[], GrammarTokenizer]) -> None:
        """`load` is called in a thread, before the first list of words."""
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._made: OrderedDict[tuple[tuple[str, ...], frozenset[int]], WordBans] = OrderedDict()
        """The last used behind the others."""
        self._making = asyncio.Lock()

    async def of(self, sampling: SamplingParams) -> WordBans:
        """What the request bans; at once for one of the last lists. Raises RequestRefused when the model's tokens have
        no texts."""
        asked = sampling.bad_words, sampling.banned_token_ids
        if asked not in self._made:
            async with self._making:
                if asked not in self._made:  # else another request has waited for the same
                    try:
                        self._made[asked] = await asyncio.to_thread(self._make, *asked)
                    except (ValueError, OSError) as error:  # a tokenizer that can't be read
                        raise RequestRefused("bad_words", f"bad_words: {error}") from error
        self._made.move_to_end(asked)
        found = self._made[asked]
        if len(self._made) > _MOST_LISTS:
            self._made.popitem(last=False)
        return found

    def _make(self, words: tuple[str, ...], always: frozenset[int]) -> WordBans:
        if self._vocabulary is None:
            self._vocabulary = Vocabulary.of(self._load())
        return WordBans(words, always, self._vocabulary)
