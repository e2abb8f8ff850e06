"""The Pictures servicer: takes pictures in, and keeps them while a gateway asks something about them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from penstock.checkpoint import PictureForm
from penstock.errors import InvalidRequest, Unavailable
from penstock.kv.bounds import check_namespace
from penstock.kv.identity import KEY_BYTES
from penstock.pictures.picture import Grid, Picture, picture_from, pixel_bytes
from penstock.pictures.reading import MOST_PICTURES, MOST_PIXEL_BYTES
from penstock.rpc.bounds import bad, check_count, check_length
from penstock.v1 import pictures_pb2, pictures_pb2_grpc
from penstock.worker.worker import Worker

_PATIENCE_S = 30.0
"""Seconds in which a gateway has to send what it names, each message of it."""


class PicturesService(pictures_pb2_grpc.PicturesServicer):
    """The pictures of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._pictures = worker.pictures
        self._engine = worker.engine
        self._most_bytes = worker.config.picture_bytes

    async def Hold(
        self,
        request_iterator: AsyncIterator[pictures_pb2.PictureNews],
        context: grpc.aio.ServicerContext[pictures_pb2.PictureNews, pictures_pb2.PicturesHeld],
    ) -> AsyncIterator[pictures_pb2.PicturesHeld]:
        """Takes what it lacks, and holds all until the stream ends."""
        names = (await _next(request_iterator)).names
        form, grids = self._check(names)
        sizes = {digest: pixel_bytes(form, grid) for digest, grid in grids.items()}
        with self._pictures.held(names.namespace, sizes) as lacking:
            wanted = [number for number, name in enumerate(names.pictures) if name.digest in lacking]
            yield pictures_pb2.PicturesHeld(wanted=wanted)
            for number in wanted:
                name = names.pictures[number]
                picture = await _taken(request_iterator, name, form, grids[name.digest])
                self._pictures.add(names.namespace, picture)
            if wanted:
                yield pictures_pb2.PicturesHeld()
            async for _ in request_iterator:
                raise InvalidRequest("all pictures are here: nothing more is to be sent", field="pixels")

    def _check(self, names: pictures_pb2.PictureNames) -> tuple[PictureForm, dict[bytes, Grid]]:
        """How the model sees pictures, and how each is cut. Raises InvalidRequest, and Unavailable for what another
        worker may take."""
        part = self._engine.checkpoint.pictures
        if part is None or self._engine.no_pictures:
            what = f"names: this model sees no pictures here: {self._engine.no_pictures}"
            raise InvalidRequest(what, field="names")
        check_namespace("names.namespace", names.namespace)
        check_count("names.pictures", names.pictures, MOST_PICTURES)
        if not names.pictures:
            raise InvalidRequest("names: come first, and name a picture", field="names")
        found = {name.digest: _grid(name, part.form) for name in names.pictures}
        if len(found) < len(names.pictures):
            raise InvalidRequest("names.pictures: each is named once", field="names.pictures")
        size = sum(pixel_bytes(part.form, grid) for grid in found.values())
        if size > (most := min(self._most_bytes, MOST_PIXEL_BYTES)):
            raise bad("names.pictures", f"{size} bytes of pixels", f"must be at most {most}: see picture_bytes")
        return part.form, found


async def _taken(
    news: AsyncIterator[pictures_pb2.PictureNews], name: pictures_pb2.PictureName, form: PictureForm, grid: Grid
) -> Picture:
    """The picture whose pixels come. Raises InvalidRequest when they are another's."""
    size, content = pixel_bytes(form, grid), bytearray()
    while len(content) < size:
        content += (await _next(news)).pixels
    if len(content) > size:
        raise bad("pixels", f"{len(content)} bytes", f"must be {size} for this picture")
    picture = await asyncio.to_thread(picture_from, form, grid, content)
    if picture.digest != name.digest:
        raise InvalidRequest("pixels: are not those that the name's digest is of", field="pixels")
    return picture


async def _next(news: AsyncIterator[pictures_pb2.PictureNews]) -> pictures_pb2.PictureNews:
    """Raises InvalidRequest for an empty one, and Unavailable when none comes in time."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            async for message in news:
                if message.HasField("names") or message.pixels:
                    return message
                break
    except TimeoutError:
        raise Unavailable("the pictures have not come in time") from None
    raise InvalidRequest("names and pixels: what was to come has not come, or was empty", field="pixels")


def _grid(name: pictures_pb2.PictureName, form: PictureForm) -> Grid:
    check_length("names.pictures.digest", name.digest, KEY_BYTES)
    wrong = form.complaint(name.rows, name.columns)
    if name.side != form.side:
        wrong = f"cells have {form.side} pixels along a side, not {name.side}"
    if wrong:  # as another worker may take it: gateway and worker have other settings of one model
        raise Unavailable(f"names.pictures: these are not what this worker's model takes: {wrong}", code="picture_form")
    return Grid(name.rows, name.columns)
