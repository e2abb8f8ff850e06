"""The process that reads pictures: `python -m penstock.pictures`, asked by `apart`."""

from __future__ import annotations

import msgspec

from penstock.checkpoint import PictureForm
from penstock.errors import InvalidRequest
from penstock.pictures.picture import GRID
from penstock.pictures.reading import read_picture
from penstock.pictures.seeing import FORMS, seen
from penstock.runtime.apart.serving import Answer, Works, serve_apart

_MEMORY = 2 << 30
"""Bytes; a picture of as many pixels as are read, twice, and its file."""


def _make(setup: bytearray) -> tuple[Works, float]:
    settings = msgspec.json.decode(setup)
    form: PictureForm = msgspec.convert(settings["form"], FORMS[settings["kind"]])
    return lambda asked: _read(asked, form), settings["seconds"]


def _read(asked: bytearray, form: PictureForm) -> Answer:
    field, _, url = asked.decode().partition("\n")
    try:
        picture = seen(read_picture(url, field), form, field)
        return "answer", GRID.pack(*picture.grid) + picture.pixels.tobytes()
    except MemoryError:
        raise InvalidRequest(f"{field}: takes too much memory to read") from None


if __name__ == "__main__":
    serve_apart(_make, memory=_MEMORY)
