"""An operator's wish that a tenant's blocks be dropped: every member is told, and answers on its own stream."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import structlog

from penstock.errors import InvalidRequest
from penstock.kv.bounds import check_keys, check_namespace
from penstock.router.drafters import DraftMember
from penstock.router.hints import Mailbox
from penstock.router.messages import role_message
from penstock.router.orders import MemberOrders
from penstock.router.registry import Seat
from penstock.rpc.bounds import check_count
from penstock.v1 import router_pb2

_ANSWER_S = 20.0
"""A store looks at all that it has, and empties places on its disk."""
_MOST_TIERS = 8
_MOST_ROOTS = 64
_AT_ONCE = 4
_LOG = structlog.get_logger("penstock.router")


class Evictions:
    """All that go on."""

    def __init__(self, seats: Mapping[Seat, Mailbox], drafters: Mapping[DraftMember, Mailbox]) -> None:
        """The mailboxes of the joined members."""
        self._seats, self._drafters = seats, drafters
        self.orders = MemberOrders[Seat | DraftMember, router_pb2.Evicted](
            most=_AT_ONCE, busy=f"{_AT_ONCE} evictions go on already"
        )

    async def evict(self, request: router_pb2.EvictRequest) -> router_pb2.EvictResponse:
        """Tells everybody; returns when all have answered or left, or when the time is over. Raises InvalidRequest and
        Overloaded."""
        check_namespace("namespace", request.namespace)
        check_count("roots", request.roots, _MOST_ROOTS)
        check_keys("roots", request.roots)
        if not request.namespace:
            raise InvalidRequest("namespace is empty: must be that of a tenant, 16 bytes", field="namespace")
        members = dict[Seat | DraftMember, Mailbox]([*self._seats.items(), *self._drafters.items()])

        def order(number: int) -> tuple[Hashable, router_pb2.JoinResponse]:
            wish = router_pb2.EvictOrder(number=number, namespace=request.namespace, roots=request.roots)
            return ("evict", number), router_pb2.JoinResponse(evict=wish)

        answers = await self.orders.give(members, order, patience_s=_ANSWER_S)
        _LOG.info("a tenant's blocks are evicted", told=len(members), answered=len(answers))
        return router_pb2.EvictResponse(
            members=[
                router_pb2.MemberEvicted(
                    member_id=one.member.id,
                    address=one.member.address,
                    role=router_pb2.ROLE_DRAFT if isinstance(one, DraftMember) else role_message(one.member.role),
                    answered=one in answers,
                    tiers=answers[one].tiers if one in answers else (),
                )
                for one in members
            ]
        )

    def heard(self, member: Seat | DraftMember, evicted: router_pb2.Evicted) -> None:
        """A member's answer; one that comes too late is dropped. Raises InvalidRequest."""
        check_count("evicted.tiers", evicted.tiers, _MOST_TIERS)
        self.orders.heard(member, evicted.number, evicted)

    def left(self, member: Seat | DraftMember) -> None:
        """A member has gone, and is not waited for."""
        self.orders.left(member)
