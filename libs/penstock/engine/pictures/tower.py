"""What turns pixels into embeddings of the text model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from penstock.checkpoint import PaddedForm, PatchForm, PictureForm, PicturePart
from penstock.engine.pictures.padded_tower import PaddedTower
from penstock.engine.pictures.patch_tower import PatchTower
from penstock.engine.pictures.tile_tower import TileTower

if TYPE_CHECKING:
    from penstock.pictures.picture import Pixels


class PictureTower(Protocol):
    """A vision encoder. Belongs to the thread that computes steps."""

    @property
    def form(self) -> PictureForm:
        """How it sees pictures."""
        ...

    def embeddings(self, pixels: Pixels) -> Tensor:
        """[parts, from top to bottom, across, 3] -> [parts, embeddings of each, hidden of the text model]."""
        ...


def tower_of(part: PicturePart, dtype: torch.dtype, device: torch.device) -> PictureTower:
    """Loads the weights, as `dtype`. Raises CheckpointError."""
    if isinstance(part.form, PatchForm):
        return PatchTower(part, dtype, device)
    if isinstance(part.form, PaddedForm):
        return PaddedTower(part, dtype, device)
    return TileTower(part, dtype, device)
