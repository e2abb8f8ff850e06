"""The process that reads pictures: `python -m penstock.pictures`, asked by `apart`."""

from __future__ import annotations

import json

from penstock.checkpoint import PictureForm
from penstock.errors import InvalidRequest
from penstock.pictures.picture import GRID
from penstock.pictures.reading import read_picture
from penstock.pictures.tiles import tiled
from penstock.runtime.apart.serving import Answer, Works, serve_apart

_MEMORY = 2 << 30
"""Bytes; a picture of as many pixels as are read, twice, and its file."""


def _make(setup: bytearray) -> tuple[Works, float]:
    settings = json.loads(setup)
    form = PictureForm(**settings["form"])
    return lambda asked: _read(asked, form), settings["seconds"]


def _read(asked: bytearray, form: PictureForm) -> Answer:
    field, _, url = asked.decode().partition("\n")
    try:
        picture = tiled(read_picture(url, field), form)
        return "answer", GRID.pack(*picture.grid) + picture.pixels.tobytes()
    except MemoryError:
        raise InvalidRequest(f"{field}: takes too much memory to read") from None


if __name__ == "__main__":
    serve_apart(_make, memory=_MEMORY)
