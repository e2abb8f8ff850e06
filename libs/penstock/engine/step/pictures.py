"""Which rows of a sequence are of pictures, and of which of their embeddings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.checkpoint import PictureForm
from penstock.engine.errors import RequestRefused
from penstock.pictures.picture import Picture, ShownPicture


@dataclass(frozen=True, slots=True)
class TileRows:
    """Consecutive embeddings of a tile, in the places of as many tokens of a sequence."""

    picture: Picture
    tile: int
    first: int
    """Of the tile's embeddings."""
    position: int
    """Of the first of them in the sequence."""
    count: int


class PictureRows:
    """The pictures of one sequence."""

    def __init__(
        self, shown: Sequence[ShownPicture], prompt: Sequence[int], form: PictureForm, owner: bytes = b""
    ) -> None:
        """`owner` is that of the request: its pictures are computed for no other. Raises RequestRefused when a picture
        has other places in the prompt than it has embeddings."""
        self.owner = owner
        self._each = form.embeddings
        self._places: list[int] = []
        """Positions of all embeddings, in order."""
        self._owners: list[tuple[Picture, int]] = []
        """The picture of each, and which of its embeddings it is."""
        end = 0
        for number, one in enumerate(shown):
            side = form.tile
            if one.picture.pixels.shape != (one.picture.grid.tiles, side, side, 3):
                raise RequestRefused(f"pictures[{number}]", f"pictures[{number}] is not in tiles of {side} pixels")
            if not (end <= one.first and one.count > 0 and one.first + one.count <= len(prompt)):
                raise RequestRefused(f"pictures[{number}]", f"pictures[{number}] has no place of its own in the prompt")
            end = one.first + one.count
            places = [at for at in range(one.first, end) if prompt[at] == form.token]
            if len(places) != one.picture.grid.tiles * self._each:
                what = f"pictures[{number}] has {one.picture.grid.tiles} tiles of {self._each} embeddings, and"
                raise RequestRefused(f"pictures[{number}]", f"{what} the prompt {len(places)} places for them")
            self._places += places
            self._owners += [(one.picture, at) for at in range(len(places))]

    def between(self, start: int, end: int) -> Iterator[TileRows]:
        """What stands at positions from `start` to `end`."""
        first, last = bisect_left(self._places, start), bisect_left(self._places, end)

        def belongs(at: int) -> tuple[int, int, int]:
            """Equal for consecutive embeddings of one tile in consecutive places."""
            picture, number = self._owners[at]
            return id(picture), number // self._each, self._places[at] - number

        for _, group in groupby(range(first, last), belongs):
            own = list(group)
            picture, number = self._owners[own[0]]
            yield TileRows(picture, number // self._each, number % self._each, self._places[own[0]], len(own))

    def tiles_between(self, start: int, end: int) -> int:
        """Of how many tiles some embeddings stand there."""
        return sum(1 for _ in self.between(start, end))

    def any_between(self, start: int, end: int) -> bool:
        """Whether there are any."""
        return bisect_left(self._places, start) < bisect_left(self._places, end)
