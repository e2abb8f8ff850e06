"""Draws by the compiled kernel: what the sampler draws on a CPU, in one pass over the logits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import CDLL, PyDLL

from torch import Tensor

from penstock.engine.kernels.cpu.build import NotBuilt, library
from penstock.engine.kernels.cpu.layout import declare
from penstock.engine.sampling import noise
from penstock.engine.sampling.choice import Choice
from penstock.engine.sampling.sampler import Draws

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
        for choice in choices:
            params = choice.params
            numbers.extend((params.temperature, params.top_p, params.min_p))
            top_k.append(min(params.top_k, vocab))
            streams.append(noise.stream(params.seed, choice.position) % 2**64)
        tokens = array("i", bytes(4 * rows))
        addresses = (each.buffer_info()[0] for each in (numbers, top_k, streams, tokens))
        draw = self._short if rows * vocab <= _SHORT else self._long
        draw(logits.data_ptr(), rows, vocab, *addresses)
        return tokens.tolist()


def native_draws() -> Draws | None:
    """None where there is no compiler. May compile for a minute."""
    try:
        return NativeDraws(library())
    except NotBuilt:
        return None
