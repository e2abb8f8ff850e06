"""Pictures that other processes read: the same pictures, and an end to those that take too long."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
import time

import pytest
from PIL import Image
from tests.libs.pictures.test_tiles import form

from penstock.errors import InvalidRequest, Unavailable
from penstock.pictures.apart import PictureProcesses, pictures_apart
from penstock.pictures.reading import read_picture
from penstock.pictures.seeing import seen
from penstock.testing.seeing import picture_url


@pytest.fixture
async def apart():
    async with pictures_apart(form()) as processes:
        yield processes


def endless_jpeg(scans):
    """A file that takes a decoder long for its size: the last scan of a progressive picture, again and again."""
    stream = io.BytesIO()
    Image.new("L", (2000, 2000), 128).save(stream, "JPEG", progressive=True)
    content = stream.getvalue()
    last = content.rindex(b"\xff\xda")
    bomb = content[:last] + content[last:-2] * scans + content[-2:]
    return f"data:image/jpeg;base64,{base64.b64encode(bomb).decode()}"


async def test_they_read_what_this_process_would(apart):
    for url in (picture_url(1, 90, 30), picture_url(2, 20, 20, "JPEG")):
        assert await asyncio.to_thread(apart.read, url, "x") == seen(read_picture(url, "x"), form(), "x")
    assert len(apart.pids) == 1, "one after the other"


async def test_refusals_name_the_field(apart):
    with pytest.raises(InvalidRequest, match=r"messages\[0\]: must be a data: URL") as refused:
        await asyncio.to_thread(apart.read, "http://127.0.0.1/", "messages[0]")
    assert refused.value.field == "messages[0]"


async def test_a_picture_that_takes_too_long_is_given_up_and_the_next_is_read(monkeypatch):
    processes = PictureProcesses(form(), seconds=0.5)
    try:
        url, began = endless_jpeg(4000), time.process_time()
        with pytest.raises(InvalidRequest, match="x: takes too long to read"):
            await asyncio.to_thread(processes.read, url, "x")
        assert time.process_time() - began < 1.0, "not here"
        good = picture_url(3, 20, 20)
        assert await asyncio.to_thread(processes.read, good, "x") == seen(read_picture(good, "x"), form(), "x")
    finally:
        processes.close()


async def test_a_process_that_is_killed_costs_one_picture(apart):
    url = picture_url(3, 20, 20)
    wanted = await asyncio.to_thread(apart.read, url, "x")
    [pid] = apart.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="a picture could not be read; try again"):
        await asyncio.to_thread(apart.read, url, "x")
    assert await asyncio.to_thread(apart.read, url, "x") == wanted
