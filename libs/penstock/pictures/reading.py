"""Reads a picture that a client sends, within bounds: nothing is fetched, and nothing is decoded before its size is
known. How long decoding takes, a file's size does not say: others have it done by `apart`."""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import TYPE_CHECKING

from penstock.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 20 << 20
"""Of a picture as it is sent."""
MOST_PIXELS = 1 << 25
MOST_PICTURES = 32
"""Of one request."""
MOST_PIXEL_BYTES = 64 << 20
"""Of all tiles of a request's pictures: of 11 that are as large as Llama 4 takes them."""
_FORMATS = {"png": "PNG", "jpeg": "JPEG", "jpg": "JPEG", "webp": "WEBP", "gif": "GIF"}
_HEAD = re.compile(r"data:image/([a-z]{1,8});base64,", re.IGNORECASE)


def read_picture(url: str, field: str) -> Image:
    """The RGB image of a data: URL, the first of an animation, turned as its file says. Raises InvalidRequest that
    names `field`."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        what = f"{field}: this gateway reads no pictures: it lacks the extra `pictures`"
        raise InvalidRequest(what, field=field) from None
    data, kind = _content(url, field)
    try:
        with Image.open(io.BytesIO(data), formats=(kind,)) as found:
            width, height = found.size
            if width * height > MOST_PIXELS:
                what = f"{field}: has {width} x {height} pixels; at most {MOST_PIXELS} are read"
                raise InvalidRequest(what, field=field)
            return ImageOps.exif_transpose(found).convert("RGB")
    except InvalidRequest:
        raise
    except Exception:  # decoders raise whatever they like
        raise InvalidRequest(f"{field}: is not a {kind} picture that can be read", field=field) from None


def _content(url: str, field: str) -> tuple[bytes, str]:
    """The bytes of a picture's file, and its format."""
    head = _HEAD.match(url[:64])
    kind = _FORMATS.get(head.group(1).lower()) if head else None
    if head is None or kind is None:
        what = f"{field}: must be a data: URL, like data:image/png;base64,...; png, jpeg, webp and gif are read"
        raise InvalidRequest(what, field=field)
    if 3 * (len(url) - head.end()) > 4 * MOST_BYTES:
        raise InvalidRequest(f"{field}: a picture may have {MOST_BYTES} bytes", field=field)
    try:
        return base64.b64decode(url[head.end() :], validate=True), kind
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{field}: what follows base64, is not base64", field=field) from None
