"""The other stores of the mesh: their addresses, those to avoid for now, and the keys that they announced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest

import grpc
import structlog

from penstock.kv.events import EventHub
from penstock.kvstore.elsewhere.homes import Directory, by_home, home
from penstock.kvstore.table.blocks import TierKind
from penstock.rpc.channels import Channels
from penstock.rpc.context import outgoing
from penstock.runtime.tasks import Failed, beside
from penstock.v1 import kvstore_pb2, kvstore_pb2_grpc

_PIECE = 512
"""Keys looked at in one step, and so told in one message: a few milliseconds of work."""
_TELL_S = 2.0
_ASK_S = 0.1
"""A home that does not answer within this is not worth waiting for: computing goes on meanwhile."""
_SHUN_S = 3.0
_UNKNOWN_S = 1.0
"""A key that its home did not know is not asked for again for this long."""
_MOST_UNKNOWN = 10_000


class Shunned:
    """Names to leave alone for a while; each entry ends by itself."""

    def __init__(self, seconds: float, clock: Callable[[], float], most: int = _MOST_UNKNOWN) -> None:
        self._seconds, self._clock, self._most = seconds, clock, most
        self._until: dict[str | bytes, float] = {}

    def add(self, name: str | bytes) -> None:
        """From now on, for `seconds`."""
        self._until.pop(name, None)
        self._until[name] = self._clock() + self._seconds
        while len(self._until) > self._most:
            del self._until[next(iter(self._until))]

    def __contains__(self, name: str | bytes) -> bool:
        until = self._until.get(name)
        if until is not None and until <= self._clock():
            del self._until[name]
            return False
        return until is not None


class Neighbours:
    """All that a store knows of the others. Only addresses that the router or the settings name are ever called."""

    def __init__(
        self,
        configured: Iterable[str],
        channels: Channels,
        *,
        max_keys: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`configured` are addresses from the settings; `max_keys` bounds the directory."""
        self.own = ""
        """The address by which the others know this store; set as soon as it is bound."""
        self.directory = Directory(max_keys)
        self.shunned = Shunned(_SHUN_S, clock)
        self._configured = frozenset(configured)
        self._joined: frozenset[str] = frozenset()
        self._unknown = Shunned(_UNKNOWN_S, clock)
        self.channels = channels
        self._changed = asyncio.Event()
        self._log = structlog.get_logger("penstock.kvstore")

    # -- who they are

    @property
    def others(self) -> frozenset[str]:
        """Addresses of the other stores."""
        return (self._joined | self._configured) - {self.own}

    def set_joined(self, addresses: Iterable[str]) -> None:
        """The stores that the router lists now; those of the settings stay."""
        before, self._joined = self.others, frozenset(addresses)
        if self.others != before:
            self._log.info("stores of the mesh changed", others=len(self.others))
            self._changed.set()

    def usable(self, addresses: Sequence[str]) -> list[str]:
        """Those of `addresses` that are stores of this mesh and have not failed a moment ago, in their order."""
        return [one for one in dict.fromkeys(addresses) if one in self.others and one not in self.shunned]

    def stub(self, address: str) -> kvstore_pb2_grpc.KvStoreAsyncStub:
        """The methods of one of them."""
        stub: kvstore_pb2_grpc.KvStoreAsyncStub = kvstore_pb2_grpc.KvStoreStub(self.channels.to(address, "store"))
        return stub

    # -- who has what

    def might_know(self, key: bytes) -> bool:
        """Whether asking for `key` is worth a try."""
        return bool(self.others) and key not in self._unknown

    async def who_has(self, key: bytes, until: float) -> list[str]:
        """Asks the key's home; empty when it does not know or does not answer."""
        where = home(key, self._members())
        found: Sequence[str] = []
        if where == self.own:
            found = self.directory.holders(key, self.others)
        elif where not in self.shunned:
            limit = min(_ASK_S, until - time.monotonic())
            stub = kvstore_pb2_grpc.KvStoreStub(self.channels.to(where, "store"))
            request = kvstore_pb2.WhoHasRequest(key=key)
            try:
                found = (await stub.WhoHas(request, timeout=max(0.001, limit), metadata=outgoing())).addresses
            except grpc.aio.AioRpcError as error:
                self.shunned.add(where)
                self._log.info("a home does not answer", home=where, reason=error.details())
        usable = self.usable(found)
        if not usable:
            self._unknown.add(key)
        return usable

    def heard(self, holder: str, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Records the keys that a store announced; ignores stores that are not of this mesh."""
        if holder in self.others:
            self.directory.removed(holder, removed)
            self.directory.stored(holder, stored)

    # -- what this one has

    async def announce(self, hub: EventHub[TierKind], keys: Callable[[], Iterable[bytes]], failed: Failed) -> None:
        """Tells the homes which blocks come and go, once other stores exist, until cancelled or the hub closes."""
        while not self.others:
            await self._changed.wait()
            self._changed.clear()
        job = partial(self._rehome, keys)
        with hub.subscribe() as subscriber:
            async with beside(job, name="rehoming", on_failure="restart", failed=failed):
                while (change := await subscriber.next()) is not None:
                    await self._tell(change.stored, change.removed)

    async def _rehome(self, keys: Callable[[], Iterable[bytes]]) -> None:
        """Tells the new homes of the keys that changed theirs, whenever a store joins or leaves."""
        after = self._members()
        while True:
            await self._changed.wait()
            self._changed.clear()
            before, after = after, self._members()
            for piece in _pieces(list(keys())):
                await self._tell([key for key in piece if home(key, before) != home(key, after)], ())
                await asyncio.sleep(0)

    async def _tell(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        for come, gone in zip_longest(_pieces(stored), _pieces(removed), fillvalue=()):
            members = self._members()
            stored_at, removed_at = by_home(come, members), by_home(gone, members)
            for where in {*stored_at, *removed_at} - {self.own}:
                if where not in self.shunned:
                    await self._announce(where, stored_at.get(where, []), removed_at.get(where, []))

    async def _announce(self, where: str, stored: list[bytes], removed: list[bytes]) -> None:
        stub = kvstore_pb2_grpc.KvStoreStub(self.channels.to(where, "store"))
        request = kvstore_pb2.AnnounceRequest(address=self.own, stored=stored, removed=removed)
        try:
            await stub.Announce(request, timeout=_TELL_S)
        except grpc.aio.AioRpcError as error:
            self.shunned.add(where)
            self._log.info("a home could not be told", home=where, reason=error.details())

    def _members(self) -> list[str]:
        return [*self.others, self.own]


def _pieces(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(keys), _PIECE):
        yield keys[start : start + _PIECE]
