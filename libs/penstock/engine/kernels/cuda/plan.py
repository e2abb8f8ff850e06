"""Which steps can be captured, and their input. Pure: numpy in host memory, no device.

A captured step has a fixed shape: a number of sequences (a bucket), each with the same number of rows. A batch with
fewer sequences is padded: the added rows are token 0 at position 0, on a scratch page that no sequence owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.engine.kernels.cuda.paged import HostPaged, Int32s
from penstock.engine.step.run import Run


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a captured step."""

    sequences: int
    rows: int
    """Rows of each sequence."""


def buckets(most: int) -> tuple[int, ...]:
    """The numbers of sequences for which steps are captured; the last one is `most`. Up to four sequences need no
    padding; beyond eight at most a third of a step is padding."""
    sizes = [1, 2, 3, 4, 6, 8]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(4, 1 << (sizes[-1].bit_length() - 2)))
    return (*(size for size in sizes if size < most), most)


def shape_of(runs: Sequence[Run], sizes: Sequence[int], most_rows: int) -> StepShape | None:
    """The shape of the captured step that computes these runs; None when there can't be one.

    All rows of all runs must be sampled, and the runs must have equally many. That holds for decode steps and for the
    verification of equally long drafts. Chunks of prompts are not captured: they spend their time in products, not in
    calls.
    """
    rows = runs[0].tokens
    if rows > most_rows or any(run.tokens != rows or run.samples != rows for run in runs):
        return None
    return next((StepShape(size, rows) for size in sizes if len(runs) <= size), None)


class StepInput:
    """The input of one captured step in one array of int32, so that one copy brings it to the device."""

    def __init__(
        self, memory: Int32s, shape: StepShape, width: int, *, block_size: int, page_vectors: int, scratch: int
    ) -> None:
        """`memory` is flat and has `size` numbers; `width` is that of the block tables; `page_vectors` is how many
        places a page has in all layers; `scratch` is the page of padding rows."""
        self.shape = shape
        self._block_size = block_size
        self._page_vectors = page_vectors
        self._scratch = scratch
        self.ids, self.positions, self.places, self.ends, tables = cut(memory, shape, width)
        self.tables = tables.reshape(shape.sequences, width)
        self._known: dict[tuple[str, int], Int32s] = {}
        starts = np.arange(0, shape.sequences * shape.rows + 1, shape.rows, dtype=np.int32)
        self.host = HostPaged(starts, self.ends, self.tables)

    @staticmethod
    def size(shape: StepShape, width: int) -> int:
        """How many numbers the input has."""
        return shape.sequences * (3 * shape.rows + 1 + width)

    def fill(self, runs: Sequence[Run]) -> None:
        """Writes the runs, in their order, and padding behind them."""
        rows = self.shape.rows
        known: dict[tuple[str, int], Int32s] = {}
        for at, run in enumerate(runs):
            own = slice(at * rows, (at + 1) * rows)
            table = self._known.get(run.table)
            if table is None:
                table = np.asarray(run.pages, dtype=np.int32)
            known[run.table] = table
            positions = np.arange(run.start, run.end, dtype=np.int32)
            self.ids[own] = run.ids
            self.positions[own] = positions
            page, offset = np.divmod(positions, self._block_size)
            self.places[own] = table[page] * self._page_vectors + offset
            self.ends[at] = run.end
            self.tables[at, : len(table)] = table[: self.tables.shape[1]]
        self._known = known
        real = len(runs)
        self.ids[real * rows :] = 0
        self.positions[real * rows :] = 0
        self.places[real * rows :] = self._scratch * self._page_vectors
        self.ends[real:] = rows
        self.tables[real:, : -(-rows // self._block_size)] = self._scratch


def cut(memory: Int32s, shape: StepShape, width: int) -> list[Int32s]:
    """Cuts the input into its parts: ids, positions, places, ends, tables (flat)."""
    rows = shape.sequences * shape.rows
    edges = np.cumsum([rows, rows, rows, shape.sequences])
    return np.split(memory, edges)
