"""What turns pixels into embeddings of the text model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from penstock.checkpoint import PatchForm, PictureForm, PicturePart
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
    kind = PatchTower if isinstance(part.form, PatchForm) else TileTower
    return kind(part, dtype, device)
