"""An operator's wish that a tenant's blocks be dropped: every member is told, and answers on its own stream."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import suppress

import structlog

from penstock.errors import InvalidRequest, Overloaded
from penstock.kv.bounds import check_keys, check_namespace
from penstock.router.hints import Mailbox
from penstock.router.messages import role_message
from penstock.router.registry import Seat
from penstock.rpc.bounds import check_count
from penstock.v1 import router_pb2

_ANSWER_S = 20.0
"""A store looks at all that it has, and empties places on its disk."""
_MOST_TIERS = 8
_MOST_ROOTS = 64
_AT_ONCE = 4
_LOG = structlog.get_logger("penstock.router")


class _Eviction:
    """One that goes on."""

    def __init__(self, seats: list[Seat]) -> None:
        self.waited = dict.fromkeys(seats, False)
        """Those who are told, and whether they have left."""
        self.answers: dict[Seat, router_pb2.Evicted] = {}
        self.over = asyncio.Event()
        self.look()

    def look(self) -> None:
        """Sets `over` when nobody is waited for any more."""
        if all(left or seat in self.answers for seat, left in self.waited.items()):
            self.over.set()


class Evictions:
    """All that go on."""

    def __init__(self, mailboxes: Mapping[Seat, Mailbox]) -> None:
        """`mailboxes` has those of the joined members."""
        self._mailboxes = mailboxes
        self._numbers = itertools.count(1)
        self._running: dict[int, _Eviction] = {}

    async def evict(self, request: router_pb2.EvictRequest) -> router_pb2.EvictResponse:
        """Tells everybody; returns when all have answered or left, or when the time is over. Raises InvalidRequest and
        Overloaded."""
        check_namespace("namespace", request.namespace)
        check_count("roots", request.roots, _MOST_ROOTS)
        check_keys("roots", request.roots)
        if not request.namespace:
            raise InvalidRequest("namespace is empty: must be that of a tenant, 16 bytes", field="namespace")
        if len(self._running) >= _AT_ONCE:
            raise Overloaded(f"{_AT_ONCE} evictions go on already", retry_after=1.0)
        number = next(self._numbers)
        eviction = self._running[number] = _Eviction(list(self._mailboxes))
        order = router_pb2.EvictOrder(number=number, namespace=request.namespace, roots=request.roots)
        try:
            for mailbox in self._mailboxes.values():
                mailbox.put(("evict", number), router_pb2.JoinResponse(evict=order))
            with suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    await eviction.over.wait()
        finally:
            del self._running[number]
        _LOG.info("a tenant's blocks are evicted", told=len(eviction.waited), answered=len(eviction.answers))
        return router_pb2.EvictResponse(
            members=[
                router_pb2.MemberEvicted(
                    member_id=seat.member.id,
                    address=seat.member.address,
                    role=role_message(seat.member.role),
                    answered=seat in eviction.answers,
                    tiers=eviction.answers[seat].tiers if seat in eviction.answers else (),
                )
                for seat in eviction.waited
            ]
        )

    def heard(self, seat: Seat, evicted: router_pb2.Evicted) -> None:
        """A member's answer; one that comes too late is dropped. Raises InvalidRequest."""
        check_count("evicted.tiers", evicted.tiers, _MOST_TIERS)
        eviction = self._running.get(evicted.number)
        if eviction is not None and seat in eviction.waited:
            eviction.answers[seat] = evicted
            eviction.look()

    def left(self, seat: Seat) -> None:
        """A member has gone, and is not waited for."""
        for eviction in self._running.values():
            if seat in eviction.waited:
                eviction.waited[seat] = True
                eviction.look()
