"""What grammars allow in a step, as step.cpp reads it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.engine.kernels.cpu.layout import LegalArgs


class Legality:
    """The legal tokens of a step's samples. The bits may be written while the step is computed: it waits for `ready`
    before it reads them."""

    def __init__(self, bits: npt.NDArray[np.int32], row: Sequence[int], ready: array[int]) -> None:
        """`bits` [rows, words] is contiguous: one for each token, the lowest of the first word first. `row` is that of
        each sample, -1 where everything is legal. `ready` holds one number, 0 until the bits are written."""
        self._kept = bits, array("i", row), ready
        words, rows, flag = bits.ctypes.data, self._kept[1].buffer_info()[0], ready.buffer_info()[0]
        self.args = LegalArgs(words, bits.shape[1], rows, flag)
        """Valid as long as this object."""
