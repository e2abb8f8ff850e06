"""Pictures that other processes read. How long a file takes to decode, its size does not say, and decoders are written
in C: what reads strangers' files is ended when it takes too long, and holds neither thread nor interpreter of who asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from penstock.checkpoint import PictureForm
from penstock.errors import InvalidRequest
from penstock.pictures.picture import GRID, Grid, Picture, picture_from
from penstock.pictures.seeing import name_of
from penstock.runtime.apart.processes import OutOfTime, ProcessesApart

READ_S = 3.0
"""Seconds of a processor for one picture."""
_MOST = 2
"""Processes, each of which may take as much memory as its bound allows."""


class PictureProcesses:
    """Reads pictures as `read_picture` and `seen` do, in other processes; waits in threads. Made by
    `pictures_apart`."""

    def __init__(self, form: PictureForm, *, seconds: float = READ_S) -> None:
        """`seconds` of a processor are allowed for one picture."""
        self._form = form
        setup = msgspec.json.encode({"kind": name_of(form), "form": form, "seconds": seconds})
        self._apart = ProcessesApart("penstock.pictures", setup, most=_MOST, what="a picture could not be read")
        self.close = self._apart.close

    @property
    def pids(self) -> list[int]:
        """Of the processes that are ready or read."""
        return self._apart.pids

    def read(self, url: str, field: str) -> Picture:
        """The picture of a data: URL. Raises InvalidRequest that names `field`, also when reading takes too long or too
        much memory; Unavailable when the process ends for another reason."""
        try:
            kind, content = self._apart.ask(f"{field}\n{url}".encode(errors="replace"))
        except OutOfTime:
            raise InvalidRequest(f"{field}: takes too long to read", field=field) from None
        if kind == "refusal":
            raise InvalidRequest(content.decode(), field=field)
        grid = Grid(*GRID.unpack_from(content))
        return picture_from(self._form, grid, memoryview(content)[GRID.size :])


@asynccontextmanager
async def pictures_apart(form: PictureForm) -> AsyncIterator[PictureProcesses]:
    """Processes for the length of the block; the first is started for the first picture."""
    processes = PictureProcesses(form)
    try:
        yield processes
    finally:
        await asyncio.to_thread(processes.close)
