"""The pictures that gateways have shown a worker: they stay while they are held, and the latest ones a while longer."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from penstock.errors import Overloaded, Unavailable
from penstock.pictures.picture import Picture

_TENANT_SHARE = 2
"""A tenant may hold a half: others find room."""


class HeldPictures:
    """Pictures by tenant: nobody can find out what others show. Bounded in bytes of pixels, those that are on their way
    among them."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._kept: OrderedDict[tuple[bytes, bytes], Picture] = OrderedDict()
        """By namespace and digest."""
        self._held: dict[tuple[bytes, bytes], int] = {}
        """Bytes of those that are held, there already or not."""
        self._holds: Counter[tuple[bytes, bytes]] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def used_bytes(self) -> int:
        """Of all that are there or have room."""
        idle = sum(one.pixels.nbytes for key, one in self._kept.items() if key not in self._held)
        return idle + sum(self._held.values())

    @contextmanager
    def held(self, namespace: bytes, sizes: Mapping[bytes, int]) -> Iterator[list[bytes]]:
        """For the length of the block these pictures stay, and have room where they are not there yet; their digests,
        with the bytes of each. Gives those that are lacking. Raises Overloaded, and then nothing has changed."""
        keys = {(namespace, digest): size for digest, size in sizes.items()}
        self._make_room(namespace, keys)
        self._held |= keys
        self._holds.update(keys.keys())
        for key in keys:
            if key in self._kept:
                self._kept.move_to_end(key)
        try:
            yield [digest for digest in sizes if (namespace, digest) not in self._kept]
        finally:
            for key in keys:
                self._holds[key] -= 1
                if not self._holds[key]:
                    del self._holds[key], self._held[key]

    def _make_room(self, namespace: bytes, keys: Mapping[tuple[bytes, bytes], int]) -> None:
        """The oldest that nobody holds leave, as far as that is needed and helps."""
        held = {**self._held, **keys}
        own = sum(size for (whose, _), size in held.items() if whose == namespace)
        share = self._most // _TENANT_SHARE if any(whose != namespace for whose, _ in held) else self._most
        needed = sum(held.values())
        if own > share or needed > self._most:
            raise Overloaded(f"pictures of {self._most} bytes are shown at a time", retry_after=1.0)
        idle = [key for key in self._kept if key not in held]
        size = sum(self._kept[key].pixels.nbytes for key in idle)
        for key in idle:
            if needed + size <= self._most:
                return
            size -= self._kept.pop(key).pixels.nbytes

    def add(self, namespace: bytes, picture: Picture) -> None:
        """Keeps a picture, which is held."""
        assert (namespace, picture.digest) in self._held, "it has no room"
        self._kept.setdefault((namespace, picture.digest), picture)

    def find(self, namespace: bytes, digest: bytes) -> Picture:
        """A tenant's picture. Raises Unavailable."""
        found = self._kept.get((namespace, digest))
        if found is None:
            raise Unavailable("a picture of the request is not here", code="picture_missing")
        return found
