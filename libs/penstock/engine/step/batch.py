"""One step as tensors: which tokens, at which positions, to which places, looking at which pages.

The rows of a step are the runs of tokens of its sequences, laid end to end. Rows that attend alike (equally many
tokens each, contexts of similar length) form a group, which is one call of attention; a chunk of a prompt is a
group of its own.

Layers with a sliding window see less of a sequence than the others do, so a group has one `Context` for each width
of view: of a windowed layer only the pages that the window touches are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.layers.adapters import AdaptedRows, AdapterWeights
from penstock.engine.step.memory import KvMemory
from penstock.engine.step.pictures import PictureRows, Turning, Turns, by_position

Ints = npt.NDArray[np.int64]
_Tables = tuple[tuple[str, int, int, int], ...]
"""Names parts of some block tables: sequence, version, first page used, end of those used."""


class Rows(Protocol):
    """Consecutive tokens of one sequence, as a step sees them; a Run."""

    @property
    def ids(self) -> Sequence[int]:
        """Of the tokens."""
        ...

    @property
    def adapter(self) -> AdapterWeights | None:
        """What its products are adapted by."""
        ...

    @property
    def pictures(self) -> PictureRows | None:
        """What takes the place of tokens' embeddings, as far as this process knows."""
        ...

    @property
    def turning(self) -> Turning | None:
        """How far they are turned; None: by their positions."""
        ...

    @property
    def start(self) -> int:
        """Position of the first token."""
        ...

    @property
    def end(self) -> int:
        """Position behind the last token's."""
        ...

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        ...

    @property
    def samples(self) -> int:
        """How many of its last tokens are sampled after."""
        ...

    @property
    def featured_tokens(self) -> int:
        """How many of its last tokens have features."""
        ...

    @property
    def pages(self) -> Sequence[int]:
        """Block table."""
        ...

    @property
    def table(self) -> tuple[str, int]:
        """Names the content of `pages`."""
        ...


def turned_apart(runs: Sequence[Rows]) -> bool:
    """Whether some rows are turned by other places than their positions."""
    return any(run.turning is not None and run.turning.turns for run in runs)


def turned_rows(runs: Sequence[Rows]) -> Turns:
    """How far all rows are turned, see Turns."""
    return np.concatenate(
        [
            by_position(run.start, run.end) if run.turning is None else run.turning.turned(run.start, run.end)
            for run in runs
        ]
    )


@dataclass(slots=True)
class Context:
    """The keys and values that a group's rows attend to, in the layers with one width of view."""

    tokens: int
    """Width of the gathered context."""
    index: Tensor
    """[layers, planes * batch * pages]: strips of the memory, see PageMemory.gather."""
    mask: Tensor | None
    causal: bool


@dataclass(slots=True)
class Group:
    """Queries [first, first + batch * rows), which attend in one call."""

    first: int
    batch: int
    rows: int
    contexts: dict[int | None, Context]
    """By the layer's window, see ModelConfig.windows."""


@dataclass(slots=True)
class Leading:
    """The first `rows` queries, which attend in one call that reads pages where they are."""

    rows: int
    attend: Callable[[int, Tensor], Tensor]
    """(layer, queries [rows, heads, head_dim]) -> [rows, heads * head_dim]."""


@dataclass(slots=True)
class Batch:
    """Everything the decoder needs for one step. N rows, S of them sampled."""

    ids: Tensor
    """[N] token ids."""
    positions: Tensor
    """[N]."""
    places: Tensor
    """[layers, planes, N]: where each row's keys and values go in PageMemory.vectors, by the number of the layer."""
    groups: list[Group]
    """Cover all N rows except the leading ones."""
    sampled: Tensor | None
    """[S] row numbers; None when all rows are sampled, and then `last_groups` is `groups`."""
    n_sampled: int
    last_groups: list[Group]
    """Cover the S sampled rows except the leading ones; the last layer computes only these."""
    leading: Leading | None = None
    last_leading: Leading | None = None
    """The leading ones among the sampled rows, which the last layer computes; as `leading`."""
    adapters: Sequence[AdaptedRows] = ()
    """Those that some rows have."""
    turned: Tensor | None = None
    """[N, 3]: how far rows are turned, see Turns; None: by their positions."""
    shown: tuple[Tensor, Tensor] | None = None
    """([M] row numbers, [M, hidden]): what stands there in place of the tokens' embeddings."""


class BatchBuilder:
    """Builds batches over one memory; keeps the gather indices of the last step, which rarely change.

    `windows` are those of the model's layers, which slide or are chunks, see ModelConfig; `dtype` is the type of
    queries.
    """

    def __init__(
        self,
        memory: KvMemory,
        device: torch.device,
        windows: Sequence[int | None],
        dtype: torch.dtype,
        *,
        chunked: bool = False,
    ) -> None:
        self._memory = memory
        self._chunked = chunked
        self._dtype = dtype
        self._device = device
        self._windows = tuple(dict.fromkeys(windows))
        # Of layers before those of the memory there is a row too, which nobody reads, so that all have their numbers.
        layer = torch.arange(-memory.first_layer, memory.n_layers, dtype=torch.int64, device=device).unsqueeze(1)
        self._run_offset = layer * memory.planes
        plane = torch.arange(memory.planes, dtype=torch.int64, device=device)
        self._place_offset = ((layer * memory.planes + plane) * memory.block_size).unsqueeze(2)
        self._indices: dict[_Tables, Tensor] = {}
        self._used: dict[_Tables, Tensor] = {}

    def build(self, runs: Sequence[Rows], leading: int = 0) -> Batch:
        """`runs` in the order that `arrange` gave them; the first `leading` of them are in no group."""
        ids = [token for run in runs for token in run.ids]
        positions = np.concatenate([np.arange(run.start, run.end) for run in runs])
        sampled = sampled_rows(runs)
        self._used = {}
        groups = self._groups(runs, [run.tokens for run in runs], leading)
        everything = len(sampled) == len(ids)
        batch = Batch(
            ids=self._tensor(ids),
            positions=self._tensor(positions),
            places=self._tensor(self._places(runs)) + self._place_offset,
            groups=groups,
            sampled=None if everything else self._tensor(sampled),
            n_sampled=len(sampled),
            last_groups=groups if everything else self._groups(runs, [run.samples for run in runs], leading),
            adapters=self._adapters(runs),
            turned=self._turned(runs),
        )
        self._indices = self._used
        return batch

    def _turned(self, runs: Sequence[Rows]) -> Tensor | None:
        return self._tensor(turned_rows(runs)) if turned_apart(runs) else None

    def _adapters(self, runs: Sequence[Rows]) -> list[AdaptedRows]:
        """The adapters of the runs, each once."""
        rows: dict[AdapterWeights, tuple[list[int], list[int]]] = {}
        first = sampled = 0
        for run in runs:
            if run.adapter is not None:
                own, own_sampled = rows.setdefault(run.adapter, ([], []))
                own += range(first, first + run.tokens)
                own_sampled += range(sampled, sampled + run.samples)
            first, sampled = first + run.tokens, sampled + run.samples
        return [AdaptedRows(adapter, *map(self._tensor, own)) for adapter, own in rows.items()]

    def _tensor(self, values: Sequence[int] | Ints) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _places(self, runs: Sequence[Rows]) -> Ints:
        """Each row's place in layer 0."""
        size = self._memory.block_size
        per_page = self._memory.n_layers * self._memory.planes * size
        places = []
        for run in runs:
            first = run.start // size
            pages = np.asarray(run.pages[first : -(-run.end // size)], dtype=np.int64)
            positions = np.arange(run.start, run.end)
            places.append(pages[positions // size - first] * per_page + positions % size)
        return np.concatenate(places)

    def _groups(self, runs: Sequence[Rows], rows: Sequence[int], leading: int) -> list[Group]:
        """Groups over the last `rows[i]` rows of each run behind the leading ones; runs with no rows are left out."""
        groups: list[Group] = []
        first = sum(rows[:leading])
        members: list[Rows] = []
        width = 0
        for run, count in [*zip(runs[leading:], rows[leading:], strict=True), (None, 0)]:
            if members and (run is None or count != width or not _alike(members[0], run, count)):
                groups.append(self._group(members, first, width))
                first += width * len(members)
                members = []
            if run is not None and count:
                members.append(run)
                width = count
        return groups

    def _group(self, members: Sequence[Rows], first: int, rows: int) -> Group:
        longest = max(run.end for run in members)
        contexts: dict[int | None, Context] = {}
        for window in self._windows:
            narrow = window if window is not None and window < longest else None
            if narrow not in contexts:
                contexts[narrow] = self._context(members, rows, narrow)
            contexts[window] = contexts[narrow]
        return Group(first, len(members), rows, contexts)

    def _context(self, members: Sequence[Rows], rows: int, window: int | None) -> Context:
        """The context of the last `rows` rows of each member, from the first page that the first of these rows sees."""
        size = self._memory.block_size
        firsts = [self._reach(run.end - rows, window) // size for run in members]
        tokens = max(run.end - first * size for run, first in zip(members, firsts, strict=True))
        mask, causal = self._mask(members, firsts, rows, tokens, window)
        return Context(tokens, self._index(members, firsts), mask, causal)

    def _reach(self, position: int, window: int | None) -> int:
        """The first position that a row at `position` looks at."""
        if window is None:
            return 0
        return position - position % window if self._chunked else max(0, position - window + 1)

    def _index(self, members: Sequence[Rows], firsts: Sequence[int]) -> Tensor:
        """Gather index of all layers, from page `firsts[i]` of each member on; reused while the pages stay the same."""
        ends = [-(-run.end // self._memory.block_size) for run in members]
        parts = list(zip(members, firsts, ends, strict=True))
        key = tuple((*run.table, first, end) for run, first, end in parts)
        index = self._used.get(key)
        if index is None:
            index = self._indices.get(key)
        if index is None:
            tables = np.zeros((len(members), max(end - first for _, first, end in parts)), dtype=np.int64)
            for row, (run, first, end) in enumerate(parts):
                tables[row, : end - first] = run.pages[first:end]
            planes = self._memory.planes
            runs = torch.from_numpy(tables).to(self._device).reshape(1, -1) * (planes * self._memory.n_layers)
            strips = runs + self._run_offset
            index = torch.cat([strips + plane for plane in range(planes)], dim=1)
        self._used[key] = index
        return index

    def _mask(
        self, members: Sequence[Rows], firsts: Sequence[int], rows: int, tokens: int, window: int | None
    ) -> tuple[Tensor | None, bool]:
        """(mask, causal) for the last `rows` rows of each member over contexts that begin at page `firsts[i]`."""
        if len(members) == 1 and window is None:
            if rows == 1:
                return None, False
            if rows == tokens:
                return None, True
        size = self._memory.block_size
        own = self._tensor([run.end - rows for run in members]).view(-1, 1, 1, 1)
        own = own + torch.arange(rows, device=self._device).view(1, 1, -1, 1)
        column = self._tensor([first * size for first in firsts]).view(-1, 1, 1, 1)
        column = column + torch.arange(tokens, device=self._device).view(1, 1, 1, -1)
        seen = column <= own
        if window is not None:
            seen &= column >= own - own % window if self._chunked else column > own - window
        return torch.zeros(seen.shape, dtype=self._dtype, device=self._device).masked_fill_(~seen, float("-inf")), False


_Run = TypeVar("_Run", bound=Rows)


def arrange(runs: Sequence[_Run]) -> list[_Run]:
    """Orders the runs so that those that attend alike are neighbours."""
    return sorted(runs, key=lambda run: (run.tokens, run.samples, len(run.pages)))


def _alike(one: Rows, other: Rows, rows: int) -> bool:
    """Whether two runs share a call of attention: decode rows whose contexts differ by less than a factor of two.

    `one` is the first of its group and has the shortest context.
    """
    return rows <= 16 and len(other.pages) <= 2 * len(one.pages) + 2


def sampled_rows(runs: Sequence[Rows]) -> list[int]:
    """Numbers of the rows whose next token is wanted, when the runs' rows are laid end to end."""
    rows: list[int] = []
    end = 0
    for run in runs:
        end += run.tokens
        rows.extend(range(end - run.samples, end))
    return rows
