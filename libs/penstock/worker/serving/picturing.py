"""The Pictures servicer: takes pictures in, and keeps them while a gateway asks something about them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from penstock.checkpoint import PictureForm
from penstock.errors import InvalidRequest
from penstock.kv.bounds import check_namespace
from penstock.kv.identity import KEY_BYTES
from penstock.pictures.picture import Grid, picture_from
from penstock.pictures.reading import MOST_PICTURES
from penstock.rpc.bounds import bad, check_count, check_length
from penstock.v1 import pictures_pb2, pictures_pb2_grpc
from penstock.worker.worker import Worker

_PATIENCE_S = 30.0
"""Seconds in which a gateway has to send what it names, each message of it."""


class PicturesService(pictures_pb2_grpc.PicturesServicer):
    """The pictures of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._pictures = worker.pictures
        self._part = worker.engine.checkpoint.pictures
        self._none = worker.engine.checkpoint.no_pictures

    async def Hold(
        self,
        request_iterator: AsyncIterator[pictures_pb2.PictureNews],
        context: grpc.aio.ServicerContext[pictures_pb2.PictureNews, pictures_pb2.PicturesHeld],
    ) -> AsyncIterator[pictures_pb2.PicturesHeld]:
        """Takes what it lacks, and holds all until the stream ends."""
        names = (await _next(request_iterator)).names
        grids = self._check(names)
        keys = [(names.namespace, name.digest) for name in names.pictures]
        with self._pictures.held(keys):
            wanted = [number for number, key in enumerate(keys) if self._pictures.lacks(key)]
            yield pictures_pb2.PicturesHeld(wanted=wanted)
            for number in wanted:
                await self._take(names, number, grids[number], request_iterator)
            if wanted:
                yield pictures_pb2.PicturesHeld()
            async for _ in request_iterator:
                raise InvalidRequest("all pictures are here: nothing more is to be sent", field="pixels")

    def _check(self, names: pictures_pb2.PictureNames) -> list[Grid]:
        """How each is cut. Raises InvalidRequest."""
        if self._part is None:
            raise InvalidRequest(f"names: this model sees no pictures: {self._none}", field="names")
        check_namespace("names.namespace", names.namespace)
        check_count("names.pictures", names.pictures, MOST_PICTURES)
        if not names.pictures:
            raise InvalidRequest("names: come first, and name a picture", field="names")
        return [_grid(name, self._part.form) for name in names.pictures]

    async def _take(
        self,
        names: pictures_pb2.PictureNames,
        number: int,
        grid: Grid,
        news: AsyncIterator[pictures_pb2.PictureNews],
    ) -> None:
        name = names.pictures[number]
        content, size = bytearray(), grid.tiles * name.side * name.side * 3
        while len(content) < size:
            content += (await _next(news)).pixels
        if len(content) > size:
            raise bad("pixels", f"{len(content)} bytes", f"must be {size} for picture {number}")
        picture = await asyncio.to_thread(picture_from, grid, name.side, bytes(content))
        if picture.digest != name.digest:
            raise InvalidRequest(f"pixels: are not those of names.pictures[{number}].digest", field="pixels")
        self._pictures.add(names.namespace, picture)


async def _next(news: AsyncIterator[pictures_pb2.PictureNews]) -> pictures_pb2.PictureNews:
    """Raises InvalidRequest when none comes, or an empty one."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            async for message in news:
                if message.WhichOneof("kind") is not None and (message.HasField("names") or message.pixels):
                    return message
                break
    except TimeoutError:
        pass
    raise InvalidRequest("names and pixels: what was to come has not come, or was empty", field="pixels")


def _grid(name: pictures_pb2.PictureName, form: PictureForm) -> Grid:
    check_length("names.pictures.digest", name.digest, KEY_BYTES)
    if name.side != form.tile:
        raise bad("names.pictures.side", str(name.side), f"must be {form.tile}")
    if not (name.rows > 0 and name.columns > 0 and name.rows * name.columns <= form.most_tiles):
        raise bad("names.pictures.rows", f"{name.rows} x {name.columns}", f"must make 1 to {form.most_tiles} tiles")
    return Grid(name.rows, name.columns)
