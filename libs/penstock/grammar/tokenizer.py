"""A model's tokens, as grammars see them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

MaskWords = npt.NDArray[np.int32]
"""Rows of bits, one for each token, the lowest bit of the first word first: the tokens that are legal."""


class GrammarTokenizer:
    """The tokens of one model. Making it takes as long as reading the vocabulary does; any thread may use it."""

    def __init__(self, content: str, vocab_size: int, eos: Collection[int]) -> None:
        """`content` is that of tokenizer.json; `vocab_size` the model's, which may be larger or smaller than the
        tokenizer's; `eos` the model's end tokens. Raises ValueError when llguidance can't read the content."""
        own = LLTokenizer(content)
        known = sorted(token for token in eos if token < own.vocab_size)
        self.core = LLTokenizer(content, n_vocab=max(vocab_size, own.vocab_size), eos_token=known or None)
        """llguidance's own."""
        self.vocab_size = vocab_size
        self.eos = frozenset(eos)
        self.words = -(-self.core.vocab_size // 32)
        """Words of a mask's row; bits from `vocab_size` on mean nothing."""
        self.marks = self.bits(self.core.eos_tokens)
        """Tokens with which a mask says that the text may end: the model's, or one of llguidance's choice."""
        self.trusted = frozenset(self.core.eos_tokens) == self.eos and self.core.vocab_size == vocab_size
        """Whether the marks are the model's end tokens and no token is beyond the model's vocabulary."""
        self.inside = self.bits(range(vocab_size))
        """The model's vocabulary."""

    @classmethod
    def read(cls, tokenizer: Path, vocab_size: int, eos: Collection[int]) -> GrammarTokenizer:
        """Of a model directory's tokenizer.json."""
        return cls(tokenizer.read_text(encoding="utf-8"), vocab_size, eos)

    def bits(self, tokens: Collection[int]) -> MaskWords:
        """A row [words] in which these tokens are legal."""
        flags = np.zeros(self.words * 32, dtype=np.uint8)
        flags[list(tokens)] = 1
        return np.packbits(flags, bitorder="little").view(np.int32)


def tokens_of(row: MaskWords) -> list[int]:
    """The tokens that are legal in a row [words], in ascending order."""
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found
