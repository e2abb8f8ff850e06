"""Embeddings of pictures for the rows of a step. A tile is computed when a step first needs it, and kept for a while:
what has its KV in pages needs none."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.pictures.tower import PictureTower
from penstock.engine.step.batch import Rows
from penstock.engine.step.pictures import TileRows

_MOST_BYTES = 256 << 20
"""Of embeddings that are kept."""


class ShownRows(NamedTuple):
    """What stands in the place of tokens' embeddings in a step."""

    rows: Tensor
    """[M] row numbers."""
    embeddings: Tensor
    """[M, hidden]."""


class ShownTiles:
    """The embeddings of tiles, the latest ones. Belongs to the thread that computes steps."""

    def __init__(self, tower: PictureTower, most_bytes: int = _MOST_BYTES) -> None:
        self._tower = tower
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[bytes, bytes, int], Tensor] = OrderedDict()
        self._bytes = 0
        self.computed = 0
        """Tiles, since the start."""
        self.found = 0
        """Times that one was there already."""
        self.took_s = 0.0
        """Seconds that all of them took."""
        self.tile_s = 0.0
        """Seconds that the slowest of them took; 0: none was computed."""

    def takes(self, order: Sequence[Rows]) -> bool:
        """Whether a step of these runs has rows of pictures."""
        shown = ((run.pictures, run) for run in order)
        return any(own is not None and own.any_between(run.start, run.end) for own, run in shown)

    def rows(self, order: Sequence[Rows]) -> ShownRows | None:
        """For a step of these runs, laid end to end; None where it has no rows of pictures."""
        numbers: list[int] = []
        found: list[Tensor] = []
        first = 0
        for run in order:
            if (own := run.pictures) is not None:
                for part in own.between(run.start, run.end):
                    begin = first + part.position - run.start
                    numbers += range(begin, begin + part.count)
                    found.append(self._of(own.owner, part)[part.first : part.first + part.count])
            first += run.tokens
        if not found:
            return None
        embeddings = torch.cat(found)
        return ShownRows(torch.tensor(numbers, device=embeddings.device), embeddings)

    def _of(self, owner: bytes, part: TileRows) -> Tensor:
        key = owner, part.picture.digest, part.tile
        found = self._kept.get(key)
        if found is None:
            began = time.perf_counter()
            found = self._tower.embeddings(part.picture.pixels[part.tile : part.tile + 1])[0]
            took_s = time.perf_counter() - began
            self.tile_s = max(self.tile_s, took_s)
            self.took_s += took_s
            self.computed += 1
            self._kept[key] = found
            self._bytes += found.nbytes
            while self._bytes > self._most_bytes and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        else:
            self.found += 1
            self._kept.move_to_end(key)
        return found
