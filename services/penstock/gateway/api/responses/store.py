"""Where responses are kept between requests: the interface, and the memory of one gateway."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec


class StoredResponse(msgspec.Struct, frozen=True):
    """A response and its own input, as JSON."""

    id: str
    ancestors: tuple[str, ...]
    """The responses that it continues, the first of its conversation first."""
    items: bytes
    """Its own input items, a list."""
    response: bytes

    @property
    def size(self) -> int:
        """Bytes that count towards the bounds."""
        return len(self.items) + len(self.response) + 48 * (1 + len(self.ancestors))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBounds:
    """How much is kept, and for how long after its last use."""

    tenant_count: int
    tenant_bytes: int
    count: int
    bytes: int
    ttl_s: float


class ResponseStore(Protocol):
    """Keeps responses by tenant; what one tenant keeps, another neither sees nor pushes out before its own bounds."""

    async def get(self, tenant: str, id: str) -> StoredResponse | None:
        """A response, or None."""

    async def chain(self, tenant: str, id: str) -> Sequence[StoredResponse] | None:
        """A response after all that it continues; None if any of them is gone."""

    async def put(self, tenant: str, response: StoredResponse) -> None:
        """Keeps a response. The least recently used ones go where it finds no room."""

    async def delete(self, tenant: str, id: str) -> bool:
        """Forgets a response; whether it was there."""


class _Shelf:
    """What one tenant keeps, the least recently used first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, tuple[StoredResponse, float]] = OrderedDict()
        self.bytes = 0

    def put(self, response: StoredResponse, now: float) -> None:
        self.drop(response.id)
        self.kept[response.id] = (response, now)
        self.bytes += response.size

    def touch(self, response: StoredResponse, now: float) -> None:
        self.kept[response.id] = (response, now)
        self.kept.move_to_end(response.id)

    def drop(self, id: str) -> bool:
        found = self.kept.pop(id, None)
        if found is not None:
            self.bytes -= found[0].size
        return found is not None

    def drop_oldest(self) -> None:
        self.drop(next(iter(self.kept)))


class MemoryResponses:
    """The responses of one gateway; they end with it."""

    def __init__(self, bounds: StoreBounds, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}

    @property
    def count(self) -> int:
        """Responses of all tenants."""
        return sum(len(shelf.kept) for shelf in self._shelves.values())

    @property
    def bytes(self) -> int:
        """Bytes of all tenants."""
        return sum(shelf.bytes for shelf in self._shelves.values())

    async def get(self, tenant: str, id: str) -> StoredResponse | None:
        """A response, or None."""
        return self._find(tenant, id)

    async def chain(self, tenant: str, id: str) -> Sequence[StoredResponse] | None:
        """A response after all that it continues; None if any of them is gone."""
        last = self._find(tenant, id)
        if last is None:
            return None
        found = [self._find(tenant, ancestor) for ancestor in last.ancestors]
        earlier = [response for response in found if response is not None]
        return [*earlier, last] if len(earlier) == len(found) else None

    async def put(self, tenant: str, response: StoredResponse) -> None:
        """Keeps a response. The least recently used ones go where it finds no room."""
        now = self._clock()
        self._forget_late(now)
        self._shelves.setdefault(tenant, _Shelf()).put(response, now)
        self._make_room(tenant)

    async def delete(self, tenant: str, id: str) -> bool:
        """Forgets a response; whether it was there."""
        there = self._find(tenant, id) is not None
        if there:
            self._drop(tenant, lambda shelf: shelf.drop(id))
        return there

    def _find(self, tenant: str, id: str) -> StoredResponse | None:
        shelf = self._shelves.get(tenant)
        found = shelf.kept.get(id) if shelf else None
        if shelf is None or found is None:
            return None
        response, used = found
        now = self._clock()
        if now - used > self._bounds.ttl_s:
            self._drop(tenant, lambda shelf: shelf.drop(id))
            return None
        shelf.touch(response, now)
        return response

    def _make_room(self, tenant: str) -> None:
        bounds = self._bounds
        while (shelf := self._shelves.get(tenant)) and (
            len(shelf.kept) > bounds.tenant_count or shelf.bytes > bounds.tenant_bytes
        ):
            self._drop(tenant, _Shelf.drop_oldest)
        while self.count > bounds.count:
            self._drop(max(self._shelves, key=lambda name: len(self._shelves[name].kept)), _Shelf.drop_oldest)
        while self.bytes > bounds.bytes:
            self._drop(max(self._shelves, key=lambda name: self._shelves[name].bytes), _Shelf.drop_oldest)

    def _forget_late(self, now: float) -> None:
        for tenant, shelf in list(self._shelves.items()):
            while shelf.kept and now - next(iter(shelf.kept.values()))[1] > self._bounds.ttl_s:
                self._drop(tenant, _Shelf.drop_oldest)

    def _drop(self, tenant: str, which: Callable[[_Shelf], object]) -> None:
        shelf = self._shelves[tenant]
        which(shelf)
        if not shelf.kept:
            del self._shelves[tenant]
