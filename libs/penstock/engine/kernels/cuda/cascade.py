"""Which sequences of a step begin with the same pages, and the list of what a kernel has to do for them. Pure: numpy.

Rows that look at the same pages can look at them together, so that each key is read once for all of them (cascade
inference; Ye et al., 2024). Sequences are put in an order in which those that begin with the same pages are neighbours;
then rows that look at a chunk together are always neighbours too, and an item of work names them by two numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.engine.kernels.cuda.paged import HostPaged, Int32s


@dataclass(frozen=True, slots=True)
class PageOrder:
    """The sequences of a step, in an order in which those that begin with the same pages are neighbours."""

    order: Int32s
    """[B]: the numbers of the sequences."""
    common: Int32s
    """[B]: how many of its first pages each has in common with the one before it in this order; the first has none. All
    rows of both see all tokens of these pages."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Sequences that are computed in one launch, because the results of their chunks exist at the same time."""

    first: int
    """Their first row, in the order of the list."""
    rows: int
    items: Int32s
    """[items, 3]: a chunk, and the rows [from, to) that look at it together, in the order of the list. Chunks come in
    their order, so that items that look at the same tokens follow each other."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """What there is to do in a step of R rows, in the order of their sequences' pages."""

    rows: Int32s
    """[R]: the numbers of the rows."""
    owners: Int32s
    """[R]: the sequence of each."""
    launches: list[Launch]


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """All that a work list depends on. It stays the same for many steps: until a context grows by a chunk."""

    order: Int32s
    """[B]: the numbers of the sequences, as in PageOrder."""
    begins: Int32s
    """[B]: the first row of each, in this order."""
    rows: Int32s
    """[B]: how many rows each has."""
    chunks: Int32s
    """[B]: how many chunks each looks at."""
    common: Int32s
    """[B]: how many of them it has in common with the one before."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outline) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__slots__
        )


def page_order(host: HostPaged, block_size: int) -> PageOrder:
    """Orders the sequences. A page counts if it was full before the step."""
    full = (host.ends - np.diff(host.starts)) // block_size
    common = np.zeros(len(full), dtype=np.int32)
    begin = host.tables[full > 0, 0]
    if len(np.unique(begin)) == len(begin):
        return PageOrder(np.arange(len(full), dtype=np.int32), common)
    known = [table[:count].tobytes() for table, count in zip(host.tables, full.tolist(), strict=True)]
    order = np.asarray(sorted(range(len(known)), key=known.__getitem__), dtype=np.int32)
    both = np.minimum(full[order[1:]], full[order[:-1]])
    width = int(both.max())
    # One column more, in which all differ.
    differ = np.ones((len(both), width + 1), dtype=np.bool_)
    np.not_equal(host.tables[order[1:], :width], host.tables[order[:-1], :width], out=differ[:, :width])
    common[1:] = np.minimum(both, differ.argmax(1))
    return PageOrder(order, common)


def outline(host: HostPaged, block_size: int, chunk: int) -> Outline:
    """Of a step whose contexts are cut into chunks of `chunk` tokens."""
    near = page_order(host, block_size)
    return Outline(
        order=near.order,
        begins=host.starts[near.order],
        rows=np.diff(host.starts)[near.order],
        chunks=(host.ends[near.order] - 1) // chunk + 1,
        common=near.common * block_size // chunk,
    )


def work_list(of: Outline, together: int, fits: int) -> WorkList:
    """Lists the chunks that rows look at: each with at most `together` rows, which are of one sequence, or of several
    that have the same pages in all of it, and all see all of it. A launch has at most `fits` rows or one sequence."""
    starts = np.zeros(len(of.rows) + 1, dtype=np.int32)
    np.cumsum(of.rows, out=starts[1:])
    rows = np.arange(starts[-1], dtype=np.int32) + np.repeat(of.begins - starts[:-1], of.rows)
    launches: list[Launch] = []
    for begin, end in _cut(starts, fits):
        items = _items(starts[begin : end + 1], of.chunks[begin:end], of.common[begin:end], together)
        launches.append(Launch(int(starts[begin]), int(starts[end] - starts[begin]), items))
    return WorkList(rows, np.repeat(of.order, of.rows), launches)


def _cut(starts: Int32s, fits: int) -> list[tuple[int, int]]:
    """Cuts sequences into ranges of at most `fits` rows or one sequence."""
    ranges, begin = [], 0
    for end in range(1, len(starts)):
        if end == len(starts) - 1 or starts[end + 1] - starts[begin] > fits:
            ranges.append((begin, end))
            begin = end
    return ranges


def _items(starts: Int32s, chunks: Int32s, common: Int32s, together: int) -> Int32s:
    """The items of sequences that have so many chunks, and so many of them in common with the one before."""
    number = np.arange(chunks.max())[:, None]
    there = number < chunks  # [chunks, sequences]
    alone = number >= common
    alone[:, 0] = True
    groups = np.flatnonzero(there & alone)  # the first sequence of each group of a chunk
    rows = np.add.reduceat((there * np.diff(starts)).ravel(), groups)
    chunk, sequence = np.divmod(groups, len(chunks))
    parts = -(-rows // together)
    which = np.repeat(np.arange(len(groups)), parts)
    part = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
    first = starts[sequence][which] + part * together
    last = np.minimum(first + together, (starts[sequence] + rows)[which])
    return np.stack((chunk[which], first, last), axis=1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Sharers:
    """Sequences that begin with the same pages."""

    sequences: list[int]
    """Their numbers, at least two."""
    pages: int
    """How many of their first pages are the same."""

    @property
    def saved(self) -> int:
        """How many reads of a page are saved when they look at these together."""
        return (len(self.sequences) - 1) * self.pages


def sharers(near: PageOrder, least: int) -> list[Sharers]:
    """Groups of sequences that have at least `least` first pages in common; no sequence is in two of them. Sequences
    that have some pages in common are one group, or several of which some have more in common, whichever saves more."""
    families: list[tuple[int, list[int], list[Sharers]]] = []
    groups: list[Sharers] = []
    for number, common in zip(near.order.tolist(), [*near.common[1:].tolist(), -1], strict=True):
        alone, groups = [number], []
        # Ends the families that have more in common than with the next sequence; each is within the one before it.
        while families and families[-1][0] >= common:
            pages, others, before = families.pop()
            alone, groups = others + alone, before + groups
            if least <= pages > common:
                alone, groups = _joined(alone, groups, pages)
        families.append((common, alone, groups))
    return groups


def _joined(alone: list[int], groups: list[Sharers], pages: int) -> tuple[list[int], list[Sharers]]:
    """(who is in no group, groups) of a family that has so many pages in common."""
    if len(alone) > 1:
        alone, groups = [], [*groups, Sharers(alone, pages)]
    everyone = alone + [sequence for group in groups for sequence in group.sequences]
    together = Sharers(sorted(everyone), pages)
    return ([], [together]) if together.saved > sum(group.saved for group in groups) else (alone, groups)
