"""What all ways to see a picture have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.checkpoint.tensors import TensorInfo


class PictureForm(Protocol):
    """How a model sees pictures: as a grid of cells, rows and columns of them, in one or several parts that do not look
    at each other. Its embeddings stand in the places of tokens."""

    @property
    def token(self) -> int:
        """In whose places embeddings stand."""
        ...

    @property
    def side(self) -> int:
        """Of a cell, pixels."""
        ...

    @property
    def spatial(self) -> bool:
        """Whether the rotation of an embedding says where in the picture it stands."""
        ...

    def shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        """(Parts, pixels from top to bottom of each, and across) of a picture in that grid."""
        ...

    def embeddings(self, rows: int, columns: int) -> int:
        """Of each part of it: so many tokens."""
        ...

    def complaint(self, rows: int, columns: int) -> str:
        """Why no picture has that grid; empty: one may."""
        ...

    def tensors(self, text_width: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the picture part; `text_width` is that of tokens' embeddings."""
        ...


@dataclass(frozen=True, slots=True)
class PicturePart:
    """What a checkpoint has for pictures."""

    form: PictureForm
    tensors: Mapping[str, TensorInfo]
    """By the names of `PictureForm.tensors`."""
