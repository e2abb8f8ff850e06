"""Masks of what must not be generated."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import numpy as np

from penstock.grammar.tokenizer import MaskWords

WORD_BITS = 32


@lru_cache(maxsize=64)
def all_but(tokens: frozenset[int], words: int) -> MaskWords:
    """A mask in which all but `tokens` are legal; not to be written to."""
    bits = np.ones(words * WORD_BITS, dtype=np.bool_)
    bits[list(tokens)] = False
    mask: MaskWords = np.packbits(bits, bitorder="little").view(np.int32)
    return mask


def left(legal: MaskWords, banned: Collection[int]) -> MaskWords:
    """What a grammar allows and is not banned; all that it allows where there is nothing else."""
    if not banned:
        return legal
    rest = legal & all_but(frozenset(banned), len(legal))
    return rest if rest.any() else legal
