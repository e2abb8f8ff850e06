"""Which rows of a sequence are of pictures, of which of their embeddings, and how far all rows are turned."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.checkpoint import PictureForm
from penstock.engine.errors import RequestRefused
from penstock.pictures.picture import Grid, Picture, ShownPicture

if TYPE_CHECKING:
    from torch import Tensor

_BEHIND = 1 << 62
"""A position behind all others."""
Turns = npt.NDArray[np.int64]
"""[rows, 3]: the place of each row in time, among the rows of its picture, and among the columns; what turns it."""


TileKey = tuple[bytes, int]
"""A picture's digest, and a tile of it: what has the same one has the same embeddings."""


def by_position(start: int, end: int) -> Turns:
    """Of the rows of a text."""
    return np.repeat(np.arange(start, end).reshape(-1, 1), 3, 1)


@dataclass(frozen=True, slots=True)
class TileRows:
    """Consecutive embeddings of a tile, in the places of as many tokens of a sequence. A picture that is not cut is one
    tile."""

    picture: Picture
    tile: int
    first: int
    """Of the tile's embeddings."""
    position: int
    """Of the first of them in the sequence."""
    count: int


class _Owner(NamedTuple):
    picture: Picture
    tile: int
    number: int
    """Of the tile's embeddings."""


class _Tile(NamedTuple):
    """A tile in a sequence."""

    picture: Picture
    number: int
    first: int
    """Position of its first embedding."""
    last: int

    @property
    def key(self) -> TileKey:
        return self.picture.digest, self.number


class Stretch(NamedTuple):
    """A picture whose embeddings are turned by their place in it."""

    first: int
    grid: Grid
    before: int
    """By so much less than by their positions tokens before it are turned."""

    @property
    def end(self) -> int:
        return self.first + self.grid.rows * self.grid.columns

    @property
    def behind(self) -> int:
        """Likewise of those behind it: it takes as many places as it has rows or columns."""
        return self.before + self.end - self.first - max(self.grid)


class Turning:
    """How far the rows of one sequence are turned."""

    def __init__(self, stretches: Iterable[Stretch] = ()) -> None:
        """`stretches` come one behind the other."""
        self.stretches = [*stretches]

    @property
    def turns(self) -> bool:
        """Whether rows are turned by other places than their positions."""
        return bool(self.stretches)

    def turned(self, start: int, end: int) -> Turns:
        """How far the rows at positions from `start` to `end` are turned; of text all three places are the same."""
        found = by_position(start, end)
        for one in self.stretches:
            if one.first >= end:
                break
            first, last = max(one.first, start), min(one.end, end)
            if first < last:
                inside = np.arange(first, last) - one.first
                place = np.stack([np.zeros_like(inside), *np.divmod(inside, one.grid.columns)], 1)
                found[first - start : last - start] = one.first - one.before + place
            behind = max(one.end, start)
            if behind < end:
                found[behind - start :] = np.arange(behind, end).reshape(-1, 1) - one.behind
        return found


class PictureRows(Turning):
    """The pictures of one sequence."""

    def __init__(
        self, shown: Sequence[ShownPicture], prompt: Sequence[int], form: PictureForm, owner: bytes = b""
    ) -> None:
        """`owner` is that of the request: its pictures are computed for no other. Raises RequestRefused when a picture
        has other places in the prompt than it has embeddings."""
        super().__init__()
        self.owner = owner
        self._places: list[int] = []
        """Positions of all embeddings, in order."""
        self._owners: list[_Owner] = []
        """Of each."""
        self._ready: dict[TileKey, Tensor] = {}
        """Embeddings of tiles, [embeddings, hidden]."""
        end = 0
        for number, one in enumerate(shown):
            at, grid = f"pictures[{number}]", one.picture.grid
            if form.complaint(*grid) or one.picture.pixels.shape != (*form.shape(*grid), 3):
                raise RequestRefused(at, f"{at} is not in cells of {form.side} pixels")
            if not (end <= one.first and one.count > 0 and one.first + one.count <= len(prompt)):
                raise RequestRefused(at, f"{at} has no place of its own in the prompt")
            end = one.first + one.count
            places = [at for at in range(one.first, end) if prompt[at] == form.token]
            each, tiles = form.embeddings(*grid), form.shape(*grid)[0]
            if len(places) != tiles * each:
                what = f"{at} has {tiles} tiles of {each} embeddings, and the prompt {len(places)} places for them"
                raise RequestRefused(at, what)
            if form.spatial:
                if places[-1] - places[0] != len(places) - 1:
                    raise RequestRefused(at, f"{at} has other tokens between its embeddings")
                before = self.stretches[-1].behind if self.stretches else 0
                self.stretches.append(Stretch(places[0], grid, before))
            self._places += places
            self._owners += [_Owner(one.picture, *divmod(place, each)) for place in range(len(places))]
        self._tiles = [_Tile(one.picture, one.tile, one.position, one.position + one.count - 1) for one in self._all()]

    def missing(self, start: int, end: int) -> tuple[Picture, int] | None:
        """The first tile with positions from `start` to `end` whose embeddings are not there yet: its picture, and its
        number."""
        tile = self._blind(start)
        return None if tile is None or tile.first >= end else (tile.picture, tile.number)

    def visible(self, start: int) -> int:
        """The first position from `start` on whose embedding is not there yet; behind all of them if there is none."""
        tile = self._blind(start)
        return _BEHIND if tile is None else max(start, tile.first)

    def _blind(self, start: int) -> _Tile | None:
        return next((tile for tile in self._tiles if tile.last >= start and tile.key not in self._ready), None)

    def give(self, picture: Picture, tile: int, embeddings: Tensor) -> None:
        """The embeddings of a tile are there: [embeddings, hidden]."""
        self._ready[picture.digest, tile] = embeddings

    def given(self, picture: Picture, tile: int) -> Tensor | None:
        """What `give` gave."""
        return self._ready.get((picture.digest, tile))

    def let_go(self, start: int) -> None:
        """Forgets embeddings of which none stand at `start` or behind it."""
        if not self._ready:
            return
        wanted = {tile.key for tile in self._tiles if tile.last >= start}
        for key in self._ready.keys() - wanted:
            del self._ready[key]

    def between(self, start: int, end: int) -> Iterator[TileRows]:
        """What stands at positions from `start` to `end`."""
        return self._rows(bisect_left(self._places, start), bisect_left(self._places, end))

    def _all(self) -> Iterator[TileRows]:
        return self._rows(0, len(self._places))

    def _rows(self, first: int, last: int) -> Iterator[TileRows]:
        """Of the embeddings with these numbers."""

        def belongs(at: int) -> tuple[int, int, int]:
            """Equal for consecutive embeddings of one tile in consecutive places."""
            owner = self._owners[at]
            return id(owner.picture), owner.tile, self._places[at] - owner.number

        for _, group in groupby(range(first, last), belongs):
            own = list(group)
            owner = self._owners[own[0]]
            yield TileRows(owner.picture, owner.tile, owner.number, self._places[own[0]], len(own))

    def any_between(self, start: int, end: int) -> bool:
        """Whether there are any."""
        return bisect_left(self._places, start) < bisect_left(self._places, end)
