"""A model's vocabulary as text: which tokens hold a word, and which go on with the rest of one.

See `joining` for where a word stands by itself. A token may begin or end within a character; what is not whole there
joins nothing, so that a word is rather found once too often.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.grammar.joining import joins
from penstock.grammar.tokenizer import GrammarTokenizer

Ids = npt.NDArray[np.int64]

_BETWEEN = 0xFF
"""Between two tokens: no byte of any text."""


class Vocabulary:
    """The texts of a model's tokens; immutable. Making it takes as long as reading them does."""

    def __init__(self, texts: Sequence[bytes], controls: Mapping[bytes, int] | None = None) -> None:
        """The texts by id, empty for control tokens: these have no text in an answer. `controls` are their ids by the
        names that they are written with."""
        self.texts = texts
        self.controls = controls or {}
        ids = sorted((token for token, text in enumerate(texts) if text), key=texts.__getitem__)
        self._ids: Ids = np.array(ids, dtype=np.int64)
        self._sorted = [texts[token] for token in ids]
        mark = bytes((_BETWEEN,))
        whole = mark + b"".join(text + mark for text in self._sorted) + 4 * mark
        self._bytes = np.frombuffer(whole, dtype=np.uint8)
        lengths = np.fromiter(map(len, self._sorted), dtype=np.int64, count=len(ids))
        self._begins: Ids = 1 + np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths + 1)))[:-1]
        self._counts = np.bincount(self._bytes, minlength=256)

    @classmethod
    def of(cls, tokenizer: GrammarTokenizer) -> Vocabulary:
        """Of a model's tokens; those that the tokenizer does not have are empty."""
        core = tokenizer.core
        texts = [core.decode_bytes([token]) for token in range(min(tokenizer.vocab_size, core.vocab_size))]
        texts += (tokenizer.vocab_size - len(texts)) * [b""]
        controls = {text: token for token, text in enumerate(texts) if text and core.is_special_token(token)}
        for token in controls.values():
            texts[token] = b""
        return cls(texts, controls)

    def holding(self, word: bytes, *, before: bool, behind: bool) -> Ids:
        """The tokens with the word in them. `before`: only where something stands before it in the token, which does
        not join it; `behind`: only where nothing that joins it follows in the token."""
        found = self._find(word)
        if before:
            found = found[~self._first[found] & ~self._joined[found]]
        if behind:
            found = found[~self._joining[found + len(word)]]
        return np.unique(self._ids[np.searchsorted(self._begins, found, side="right") - 1])

    def beginning(self, rest: bytes, *, behind: bool) -> Ids:
        """The tokens that begin with the rest of a word; `behind` as in `holding`."""
        low = bisect_left(self._sorted, rest)
        high = bisect_left(self._sorted, rest[:-1] + bytes((rest[-1] + 1,)), low)
        found = self._ids[low:high]
        return found[~self._joining[self._begins[low:high] + len(rest)]] if behind else found

    def _find(self, word: bytes) -> Ids:
        """Where the word begins in all texts."""
        rarest = min(range(len(word)), key=lambda at: self._counts[word[at]])
        found = np.flatnonzero(self._bytes == word[rarest]) - rarest
        found = found[(found > 0) & (found + len(word) < len(self._bytes))]
        for at, byte in enumerate(word):
            found = found[self._bytes[found + at] == byte]
        return found

    @cached_property
    def _first(self) -> npt.NDArray[np.bool_]:
        """Whether a token begins at a byte."""
        flags = np.zeros(len(self._bytes), dtype=np.bool_)
        flags[self._begins] = True
        return flags

    @cached_property
    def _joining(self) -> npt.NDArray[np.bool_]:
        """Whether a whole character begins at a byte that joins what stands before it."""
        letters = self._letters
        known, at = np.unique(letters, return_inverse=True)
        flags = np.array([code >= 0 and joins(chr(code)) for code in known.tolist()], dtype=np.bool_)
        found: npt.NDArray[np.bool_] = flags[at].reshape(letters.shape)
        return found

    @cached_property
    def _joined(self) -> npt.NDArray[np.bool_]:
        """Whether a whole character that joins what follows ends right before a byte."""
        begins = np.flatnonzero(self._joining)
        code = self._letters[begins]
        flags = np.zeros(len(self._bytes), dtype=np.bool_)
        flags[begins + 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000)] = True
        return flags

    @cached_property
    def _letters(self) -> npt.NDArray[np.int32]:
        """The code of the whole character that begins at a byte, else -1."""
        first = self._bytes.astype(np.int32)
        rest = [np.concatenate((first[by:], np.full(by, _BETWEEN, np.int32))) for by in (1, 2, 3)]
        whole = [(byte & 0xC0) == 0x80 for byte in rest]
        low = [byte & 0x3F for byte in rest]
        two, three, four = (
            (first >= begin) & (first < end) for begin, end in ((0xC2, 0xE0), (0xE0, 0xF0), (0xF0, 0xF5))
        )
        codes = np.where(first < 0x80, first, -1)
        codes = np.where(two & whole[0], (first & 0x1F) << 6 | low[0], codes)
        codes = np.where(three & whole[0] & whole[1], (first & 0xF) << 12 | low[0] << 6 | low[1], codes)
        longest = (first & 7) << 18 | low[0] << 12 | low[1] << 6 | low[2]
        codes = np.where(four & whole[0] & whole[1] & whole[2] & (longest < 0x110000), longest, codes)
        return codes.astype(np.int32)
