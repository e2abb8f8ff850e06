"""Which rows of a sequence are of pictures, of which of their embeddings, and how far all rows are turned."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.checkpoint import PictureForm
from penstock.engine.errors import RequestRefused
from penstock.pictures.picture import Grid, Picture, ShownPicture

Turns = npt.NDArray[np.int64]
"""[rows, 3]: the place of each row in time, among the rows of its picture, and among the columns; what turns it."""


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


class _Stretch(NamedTuple):
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


class PictureRows:
    """The pictures of one sequence."""

    def __init__(
        self, shown: Sequence[ShownPicture], prompt: Sequence[int], form: PictureForm, owner: bytes = b""
    ) -> None:
        """`owner` is that of the request: its pictures are computed for no other. Raises RequestRefused when a picture
        has other places in the prompt than it has embeddings."""
        self.owner = owner
        self._places: list[int] = []
        """Positions of all embeddings, in order."""
        self._owners: list[_Owner] = []
        """Of each."""
        self._stretches: list[_Stretch] = []
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
                before = self._stretches[-1].behind if self._stretches else 0
                self._stretches.append(_Stretch(places[0], grid, before))
            self._places += places
            self._owners += [_Owner(one.picture, *divmod(place, each)) for place in range(len(places))]

    @property
    def turns(self) -> bool:
        """Whether rows are turned by other places than their positions."""
        return bool(self._stretches)

    def turned(self, start: int, end: int) -> Turns:
        """How far the rows at positions from `start` to `end` are turned; of text all three places are the same."""
        found = by_position(start, end)
        for one in self._stretches:
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

    def between(self, start: int, end: int) -> Iterator[TileRows]:
        """What stands at positions from `start` to `end`."""
        first, last = bisect_left(self._places, start), bisect_left(self._places, end)

        def belongs(at: int) -> tuple[int, int, int]:
            """Equal for consecutive embeddings of one tile in consecutive places."""
            owner = self._owners[at]
            return id(owner.picture), owner.tile, self._places[at] - owner.number

        for _, group in groupby(range(first, last), belongs):
            own = list(group)
            owner = self._owners[own[0]]
            yield TileRows(owner.picture, owner.tile, owner.number, self._places[own[0]], len(own))

    def tiles_between(self, start: int, end: int) -> int:
        """Of how many tiles some embeddings stand there."""
        return sum(1 for _ in self.between(start, end))

    def any_between(self, start: int, end: int) -> bool:
        """Whether there are any."""
        return bisect_left(self._places, start) < bisect_left(self._places, end)
