"""What clients send as pictures: read within bounds, or refused by the name of its field."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.errors import InvalidRequest
from penstock.pictures import reading
from penstock.pictures.reading import read_picture
from penstock.testing.seeing import picture_url


def url_of(content, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def saved(image, kind, **more):
    stream = io.BytesIO()
    image.save(stream, kind, **more)
    return stream.getvalue()


def chunk(name, content):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def huge(width, height):
    """A PNG of a few bytes that says it is large."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats(kind):
    assert read_picture(picture_url(1, 30, 20, kind), "x").size == (30, 20)


def test_a_picture_stands_as_its_file_says_and_has_three_colours():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    turned = read_picture(url_of(saved(Image.new("RGB", (30, 20)), "JPEG", exif=exif), "jpeg"), "x")
    assert (turned.size, turned.mode) == ((20, 30), "RGB")
    clear = read_picture(url_of(saved(Image.new("LA", (3, 2)), "PNG")), "x")
    assert (clear.size, clear.mode) == ((3, 2), "RGB")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1/x.png", "x: must be a data: URL"),
        ("file:///etc/passwd", "x: must be a data: URL"),
        ("data:image/svg+xml;base64,AAAA", "x: must be a data: URL"),
        ("data:image/png,AAAA", "x: must be a data: URL"),
        (url_of(huge(1 << 13, 1 << 13)), "x: has 8192 x 8192 pixels; at most 33554432 are read"),
        (url_of(huge(1 << 15, 1 << 15)), "x: is not a PNG picture that can be read"),
        (url_of(huge(100, 100)), "x: is not a PNG picture that can be read"),
        (url_of(saved(Image.new("RGB", (3, 2)), "BMP")), "x: is not a PNG picture that can be read"),
        ("data:image/png;base64,AA AA", "x: what follows base64, is not base64"),
    ],
)
def test_what_is_refused(url, says):
    with pytest.raises(InvalidRequest) as refused:
        read_picture(url, "x")
    assert refused.value.message.startswith(says) and refused.value.field == "x"


def test_a_large_file_is_not_even_decoded(monkeypatch):
    monkeypatch.setattr(reading, "MOST_BYTES", 300)
    assert read_picture(url_of(saved(Image.new("RGB", (3, 2)), "PNG")), "x").size == (3, 2)
    with pytest.raises(InvalidRequest, match="x: a picture may have 300 bytes"):
        read_picture(picture_url(1, 30, 20), "x")


@settings(deadline=None)
@given(st.data())
def test_damaged_files_are_refused_or_read(data):
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]))
    content = bytearray(base64.b64decode(picture_url(1, 9, 7, kind).split(",")[1]))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(1, len(content))) :]
    try:
        found = read_picture(url_of(bytes(content), kind.lower()), "x")
    except InvalidRequest:
        return
    assert found.mode == "RGB" and found.width * found.height <= reading.MOST_PIXELS
