"""What turns pixels into embeddings of the text model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from penstock.checkpoint import PaddedForm, PatchForm, PictureForm, PicturePart
from penstock.engine.pictures.padded_tower import PaddedTower
from penstock.engine.pictures.patch_tower import PatchTower
from penstock.engine.pictures.tile_tower import TileTower
from penstock.engine.pictures.weights import Parts

if TYPE_CHECKING:
    from penstock.pictures.picture import Pixels


class PictureTower(Protocol):
    """A vision encoder. Belongs to the thread that computes steps."""

    @property
    def form(self) -> PictureForm:
        """How it sees pictures."""
        ...

    def parts(self, pixels: Pixels) -> Parts:
        """[tiles, from top to bottom, across, 3] -> [tiles, embeddings of each, hidden of the text model]."""
        ...


def embeddings(tower: PictureTower, pixels: Pixels) -> Tensor:
    """What a tower makes of pixels, without a stop."""
    parts = tower.parts(pixels)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            found: Tensor = end.value
            return found


def tower_of(part: PicturePart, dtype: torch.dtype, device: torch.device) -> PictureTower:
    """Loads the weights, as `dtype`. Raises CheckpointError."""
    if isinstance(part.form, PatchForm):
        return PatchTower(part, dtype, device)
    if isinstance(part.form, PaddedForm):
        return PaddedTower(part, dtype, device)
    return TileTower(part, dtype, device)
