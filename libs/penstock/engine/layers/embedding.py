"""From tokens to vectors."""

from __future__ import annotations

import os
import weakref

import torch
from torch import Tensor

from penstock.checkpoint import CheckpointError, TensorInfo
from penstock.engine.layers.stored import STORED


class Embedding:
    """Rows of `table` [vocab, hidden] become `dtype` when they are asked for; with `scale` they are multiplied by it,
    where the family does that."""

    def __init__(self, table: Tensor | StoredTable, dtype: torch.dtype, scale: float = 1.0) -> None:
        self._table = table
        self._dtype = dtype
        self.device = table.device if isinstance(table, Tensor) else torch.device("cpu")
        self._scale = None if scale == 1.0 else torch.tensor(scale, dtype=dtype, device=self.device)

    @property
    def plain(self) -> Tensor | None:
        """The table, where it is in memory and its rows are used as they are."""
        return self._table if isinstance(self._table, Tensor) and self._scale is None else None

    def rows(self, ids: Tensor) -> Tensor:
        """[N] -> [N, hidden], memory of their own."""
        table = self._table
        found = table.index_select(0, ids) if isinstance(table, Tensor) else table.rows(ids.tolist())
        found = found.to(self._dtype)
        return found if self._scale is None else found.mul_(self._scale)


class StoredTable:
    """A matrix of the checkpoint, [vocab, hidden], that stays in its file: a token's row is one read, mostly of the
    page cache, and costs the process no memory."""

    def __init__(self, info: TensorInfo) -> None:
        """Raises CheckpointError."""
        self._info = info
        try:
            self._file = os.open(info.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(info.file, f"cannot be read: {error.strerror}") from None
        weakref.finalize(self, os.close, self._file)
        self._row_bytes = info.nbytes // info.shape[0]

    def rows(self, ids: list[int]) -> Tensor:
        """[N, hidden] as they are stored. Raises CheckpointError when the file has been cut short."""
        found = torch.empty(len(ids), self._info.shape[1], dtype=STORED[self._info.dtype])
        room, size = found.view(-1).view(torch.uint8).numpy().data, self._row_bytes
        for number, token in enumerate(ids):
            row = room[number * size : (number + 1) * size]
            if os.preadv(self._file, [row], self._info.offset + token * size) != size:
                raise CheckpointError(self._info.file, f"is cut short: row {token} of {self._info.name} is not there")
        return found
