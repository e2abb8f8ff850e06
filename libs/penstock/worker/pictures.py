"""The pictures that gateways have shown a worker: they stay while they are held, and the latest ones a while longer."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.errors import Overloaded, Unavailable
from penstock.pictures.picture import Picture

PictureKey = tuple[bytes, bytes]
"""Namespace of the tenant, and digest."""


class HeldPictures:
    """Pictures by tenant: nobody can find out what others show. Bounded in bytes of pixels."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._kept: OrderedDict[PictureKey, Picture] = OrderedDict()
        self._holds: Counter[PictureKey] = Counter()
        self.bytes = 0
        """Of all that are there."""

    @contextmanager
    def held(self, keys: Sequence[PictureKey]) -> Iterator[None]:
        """For the length of the block these pictures stay, those that come meanwhile too."""
        self._holds.update(keys)
        for key in keys:
            if key in self._kept:
                self._kept.move_to_end(key)
        try:
            yield
        finally:
            self._holds.subtract(keys)
            self._holds += Counter()  # without those that nobody holds

    def lacks(self, key: PictureKey) -> bool:
        """Whether a picture is not there."""
        return key not in self._kept

    def add(self, namespace: bytes, picture: Picture) -> None:
        """Keeps a picture; the oldest that nobody holds make room. Raises Overloaded when there is none."""
        key, size = (namespace, picture.digest), picture.pixels.nbytes
        if key in self._kept:
            return
        idle = [other for other in self._kept if other not in self._holds]
        while self.bytes + size > self._most:
            if not idle:
                raise Overloaded(f"pictures of {self._most} bytes are shown already", retry_after=1.0)
            self.bytes -= self._kept.pop(idle.pop(0)).pixels.nbytes
        self._kept[key] = picture
        self.bytes += size

    def find(self, namespace: bytes, digest: bytes) -> Picture:
        """A tenant's picture. Raises Unavailable."""
        found = self._kept.get((namespace, digest))
        if found is None:
            raise Unavailable("a picture of the request is not here", code="picture_missing")
        return found
