"""Tokens chosen by the compiled kernel: what the sampler does on a CPU, in one pass over the logits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import CDLL, PyDLL

import numpy as np
from torch import Tensor

from penstock.engine.kernels.cpu.build import NotBuilt, library
from penstock.engine.kernels.cpu.layout import declare
from penstock.engine.sampling import noise
from penstock.engine.sampling.bans import WORD_BITS, all_but, left
from penstock.engine.sampling.choice import Choice
from penstock.engine.sampling.sampler import Draws
from penstock.grammar.tokenizer import MaskWords

_SHORT = 1 << 17
"""So many logits are drawn from without letting go of the GIL: to get it back may take longer."""


class NativeDraws:
    """In C++."""

    def __init__(self, library: CDLL) -> None:
        quick = PyDLL(library._name, handle=library._handle)
        declare(quick)
        self._short, self._long = quick.penstock_draw, library.penstock_draw

    def __call__(self, logits: Tensor, choices: Sequence[Choice]) -> list[int]:
        """See `Draws`."""
        rows, vocab = logits.shape
        numbers, top_k, streams = array("f"), array("i"), array("Q")
        masks = [_legal(choice, -(-vocab // WORD_BITS)) for choice in choices]
        for choice in choices:
            params = choice.params
            numbers.extend((0.0 if choice.greedy else params.temperature, params.top_p, params.min_p))
            top_k.append(min(params.top_k, vocab))
            streams.append(noise.stream(params.seed, choice.position) % 2**64)
        at = array("Q", [0 if mask is None else mask.ctypes.data for mask in masks])
        tokens = array("i", bytes(4 * rows))
        addresses = (each.buffer_info()[0] for each in (numbers, top_k, streams, at, tokens))
        draw = self._short if rows * vocab <= _SHORT else self._long
        draw(logits.data_ptr(), rows, vocab, *addresses)
        return tokens.tolist()


def _legal(choice: Choice, words: int) -> MaskWords | None:
    """A mask of what may be chosen; None: everything."""
    banned = choice.banned
    if choice.legal is not None:
        return np.ascontiguousarray(left(choice.legal, banned))
    return all_but(banned, words) if banned else None


def native_draws() -> Draws | None:
    """None where there is no compiler. May compile for a minute."""
    try:
        return NativeDraws(library())
    except NotBuilt:
        return None
