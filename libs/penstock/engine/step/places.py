"""Where tokens are in pages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def token_places(
    runs: Iterable[tuple[Sequence[int], int, int]], block_size: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(page, offset in it) of each token of some runs, laid end to end: [tokens] each. A run is its block table, the
    position of its first token, and how many there are."""
    pages, offsets = [], []
    for table, start, tokens in runs:
        first = start // block_size
        positions = np.arange(start, start + tokens)
        own = np.asarray(table[first : -(-(start + tokens) // block_size)], np.intp)
        pages.append(own[positions // block_size - first])
        offsets.append(positions % block_size)
    return np.concatenate(pages), np.concatenate(offsets)
