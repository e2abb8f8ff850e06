"""Embeddings of pictures for the rows of steps. What has its KV in pages needs none; what has not is computed between
steps, a part at a time, so that streams go on beside a picture of any size. Embeddings are kept for a while."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.pictures.tower import PictureTower
from penstock.engine.pictures.weights import Parts
from penstock.engine.step.batch import Rows
from penstock.engine.step.pictures import PictureRows
from penstock.pictures.picture import Picture

_MOST_BYTES = 256 << 20
"""Of embeddings that are kept."""
_Key = tuple[bytes, bytes, int]
"""An owner, a picture's digest, and the number of a tile."""


class ShownRows(NamedTuple):
    """What stands in the place of tokens' embeddings in a step."""

    rows: Tensor
    """[M] row numbers."""
    embeddings: Tensor
    """[M, hidden]."""


class ShownTiles:
    """The embeddings of tiles, the latest ones. Belongs to the thread that computes steps."""

    def __init__(self, tower: PictureTower, place: torch.device, most_bytes: int = _MOST_BYTES) -> None:
        """`place` is where the tower computes."""
        self._tower = tower
        self._place = place
        self._most_bytes = most_bytes
        self._kept: OrderedDict[_Key, Tensor] = OrderedDict()
        self._bytes = 0
        self.computed = 0
        """Tiles, since the start."""
        self.found = 0
        """Times that a sequence found one that had been computed before."""
        self.took_s = 0.0
        """Seconds that they took."""
        self._begun: tuple[_Key, Parts] | None = None
        """The tile that is being computed."""

    @property
    def begun(self) -> bool:
        """Whether a tile is computed in part."""
        return self._begun is not None

    def give_up(self) -> None:
        """Nobody wants what was begun."""
        self._begun = None

    def takes(self, order: Sequence[Rows]) -> bool:
        """Whether a step of these runs has rows of pictures."""
        shown = ((run.pictures, run) for run in order)
        return any(own is not None and own.any_between(run.start, run.end) for own, run in shown)

    def rows(self, order: Sequence[Rows]) -> ShownRows | None:
        """For a step of these runs, laid end to end; None where it has no rows of pictures. What `advance` has not
        computed is computed now."""
        numbers: list[int] = []
        found: list[Tensor] = []
        first = 0
        for run in order:
            if (own := run.pictures) is not None:
                for part in own.between(run.start, run.end):
                    begin = first + part.position - run.start
                    numbers += range(begin, begin + part.count)
                    tile = self._of(own, part.picture, part.tile, math.inf)
                    assert tile is not None
                    found.append(tile[part.first : part.first + part.count])
            first += run.tokens
        if not found:
            return None
        embeddings = torch.cat(found)
        return ShownRows(torch.tensor(numbers, device=embeddings.device), embeddings)

    def advance(self, own: PictureRows, start: int, end: int, seconds: float) -> None:
        """Goes on with the embeddings of a sequence between two positions, for about so long; a part at least."""
        until = time.perf_counter() + seconds
        while (missing := own.missing(start, end)) is not None:
            if self._of(own, *missing, until) is None or time.perf_counter() >= until:
                return

    def _of(self, own: PictureRows, picture: Picture, tile: int, until: float) -> Tensor | None:
        """The embeddings of a tile, which its sequence has then; None: they were not ready in time."""
        found = own.given(picture, tile)
        if found is not None:
            return found
        key = own.owner, picture.digest, tile
        found = self._kept.get(key)
        if found is None:
            found = self._computed(key, picture, until)
            if found is None:
                return None
            self._keep(key, found)
        else:
            self.found += 1
            self._kept.move_to_end(key)
        own.give(picture, tile, found)
        return found

    def _computed(self, key: _Key, picture: Picture, until: float) -> Tensor | None:
        """Goes on with a tile until it is there, or the time is over; what else was begun is given up."""
        if self._begun is None or self._begun[0] != key:
            self._begun = key, self._tower.parts(picture.pixels[key[2] : key[2] + 1])
        began = time.perf_counter()
        try:
            while True:
                next(self._begun[1])
                if self._place.type == "cuda":  # else the clock says how long launches take
                    torch.cuda.current_stream(self._place).synchronize()
                if time.perf_counter() >= until:
                    return None
        except StopIteration as end:
            self._begun = None
            self.computed += 1
            found: Tensor = end.value[0]
            return found
        except BaseException:
            self._begun = None
            raise
        finally:
            self.took_s += time.perf_counter() - began

    def _keep(self, key: _Key, embeddings: Tensor) -> None:
        self._kept[key] = embeddings
        self._bytes += embeddings.nbytes
        while self._bytes > self._most_bytes and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
