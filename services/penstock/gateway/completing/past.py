"""What is remembered of requests that have ended, for GET /v1/requests/{id}: the last ones, by number and by bytes.

Tenants share the room: where it is used up, who takes most of it, by number or by bytes, loses its oldest record. So no
tenant can push out the records of others by sending more requests, and one that is alone has all of the room.
"""

from __future__ import annotations

import heapq
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.runtime.config import format_size

_SPARE_PLACES = 64
_PREFIX = re.compile(r"^(chatcmpl|cmpl|resp|msg)[-_]")


@dataclass(frozen=True, slots=True)
class _Record:
    number: int
    """Of all records that there ever were."""
    request: str
    """The request's id, which its client may have used before."""
    text: bytes
    at: float
    """When it was added."""


_Place = tuple[float, int, str]
"""(negative share of the room, number of the oldest record, tenant): the first loses its oldest record."""


@dataclass(slots=True)
class _Records:
    """Those of one tenant."""

    kept: OrderedDict[str, _Record] = field(default_factory=OrderedDict)
    """By the response's id, oldest first."""
    names: dict[str, OrderedDict[str, None]] = field(default_factory=dict)
    """The responses' ids by the request's, oldest first."""
    bytes: int = 0
    place: _Place | None = None
    """Among those who may lose a record."""

    @property
    def oldest(self) -> int:
        """The number of the oldest one."""
        return next(iter(self.kept.values())).number

    def add(self, response: str, record: _Record) -> None:
        """Remembers a record under an id of which there is none."""
        self.kept[response] = record
        self.names.setdefault(record.request, OrderedDict())[response] = None
        self.bytes += len(record.text)

    def find(self, id: str) -> _Record | None:
        """The last one of that id."""
        if names := self.names.get(id):
            return self.kept[next(reversed(names))]
        return self.kept.get(_PREFIX.sub("", id))

    def forget(self, response: str) -> int:
        """Forgets one; gives its bytes."""
        record = self.kept.pop(response)
        names = self.names[record.request]
        del names[response]
        if not names:
            del self.names[record.request]
        self.bytes -= len(record.text)
        return len(record.text)


class PastRequests:
    """Records of requests, each under the ids that its client knows: that of the request and that of the response."""

    def __init__(self, most: int, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Keeps at most `most` records, of at most `most_bytes` together; the newest one always, unless `most` is 0."""
        self._clock = clock
        self._most = most
        self._most_bytes = most_bytes
        self._tenants: dict[str, _Records] = {}
        self._places: list[_Place] = []
        """A heap, in which a place that is not its tenant's any more means nothing."""
        self._count = 0
        self._added = 0
        self._newest = ""
        """Whose record was added last."""
        self.bytes = 0
        """Of all records together."""

    def __len__(self) -> int:
        return self._count

    def add(self, tenant: str, request: str, response: str, record: bytes) -> None:
        """Remembers a request that was `request` to its client, and its answer `response`. A request that is sent
        again with its key has the same answer: the later record takes the place of the earlier one."""
        if self._most == 0:
            return
        self._added += 1
        if self._newest in self._tenants:
            self._put(self._newest)  # it may lose now what was the newest
        self._newest = tenant
        own = self._tenants.setdefault(tenant, _Records())
        if response in own.kept:
            self._take_out(own, response)
        own.add(response, _Record(self._added, request, record, self._clock()))
        self._count += 1
        self.bytes += len(record)
        self._put(tenant)
        while self._count > self._most or (self.bytes > self._most_bytes and self._count > 1):
            self._forget()

    def find(self, id: str, tenant: str | None) -> bytes | None:
        """The last record with that id, of a request or a response; only of `tenant` unless that is None."""
        if tenant is None:
            found = [record for records in self._tenants.values() if (record := records.find(id)) is not None]
            return max(found, key=lambda record: record.number).text if found else None
        own = self._tenants.get(tenant)
        record = own.find(id) if own is not None else None
        return record.text if record is not None else None

    def latest(self, most: int) -> list[tuple[float, bytes]]:
        """The newest records of all tenants, and when they were added; the newest first."""
        every = (record for records in self._tenants.values() for record in records.kept.values())
        return [(one.at, one.text) for one in heapq.nlargest(most, every, key=lambda one: one.number)]

    @property
    def bounds(self) -> str:
        """How many are kept, and until when."""
        room = format_size(self._most_bytes)
        return f"the last {self._most} that have ended, in {room} at most, until newer ones take their room"

    def kept(self) -> str:
        """How many there are now, and since when."""
        if not self._count:
            return "none has ended yet"
        oldest = min(next(iter(records.kept.values())).at for records in self._tenants.values())
        return f"{self._count} are kept now, the oldest for {self._clock() - oldest:.0f} s"

    def _forget(self) -> None:
        """Forgets the oldest record of the tenant that takes most room; of several alike, the oldest of them all. Never
        the newest."""
        while True:
            place = heapq.heappop(self._places)
            name = place[2]
            records = self._tenants.get(name)
            if records is not None and records.place is place:
                break
        self._take_out(records, next(iter(records.kept)))
        if records.kept:
            self._put(name)
        else:
            del self._tenants[name]

    def _take_out(self, records: _Records, response: str) -> None:
        self.bytes -= records.forget(response)
        self._count -= 1

    def _put(self, name: str) -> None:
        """Gives a tenant its place; none while only the newest record is left of it."""
        records = self._tenants[name]
        records.place = None
        if records.oldest != self._added:
            share = max(len(records.kept) / self._most, records.bytes / max(1, self._most_bytes))
            records.place = (-share, records.oldest, name)
            heapq.heappush(self._places, records.place)
        if len(self._places) > 2 * len(self._tenants) + _SPARE_PLACES:
            self._places = [found.place for found in self._tenants.values() if found.place is not None]
            heapq.heapify(self._places)
