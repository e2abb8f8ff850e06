"""The ways in which models see pictures: how each is cut or scaled, and which tokens stand for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.checkpoint import PaddedForm, PatchForm, PictureForm, TileForm
from penstock.errors import InvalidRequest
from penstock.pictures import tiles
from penstock.pictures.padded import PAD, padded
from penstock.pictures.patches import LONGEST, PATCH, patched
from penstock.pictures.picture import Grid, Picture

if TYPE_CHECKING:
    from PIL.Image import Image

FORMS: Mapping[str, type[PaddedForm | PatchForm | TileForm]] = {
    "tiles": TileForm,
    "patches": PatchForm,
    "padded": PaddedForm,
}
"""By names for other processes."""


def name_of(form: PictureForm) -> str:
    """In FORMS."""
    return next(name for name, kind in FORMS.items() if isinstance(form, kind))


def texts_of(form: PictureForm) -> Mapping[str, str]:
    """The tokens around and in the places of embeddings, by what they are for: `whole`, which the chat template writes
    for each picture, `patch`, and others."""
    if isinstance(form, TileForm):
        return tiles.TEXTS
    text = PATCH if isinstance(form, PatchForm) else PAD
    return {"whole": text, "patch": text}


def seen(image: Image, form: PictureForm, field: str) -> Picture:
    """An RGB image as the model sees it. Raises InvalidRequest that names `field`."""
    if isinstance(form, TileForm):
        return tiles.tiled(image, form)
    if isinstance(form, PaddedForm):
        return padded(image, form)
    assert isinstance(form, PatchForm)
    if max(image.size) > LONGEST * min(image.size):
        what = f"{field}: {image.width} x {image.height} pixels: no side may be {LONGEST} times as long as the other"
        raise InvalidRequest(what, field=field)
    return patched(image, form)


def tokens_of(grid: Grid, form: PictureForm, ids: Mapping[str, int]) -> list[int]:
    """The tokens of a picture; `ids` are those of `texts_of`, by their names there."""
    if isinstance(form, TileForm):
        return tiles.tokens_of(grid, form, ids)
    return [ids["patch"]] * form.embeddings(*grid)
