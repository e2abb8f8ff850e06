"""What people want to see of the mesh, as the routers know it.

However many look, and however often, a router is asked once a second at most; where nobody looks, it is not asked.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from penstock.gateway.mesh.sites import Sites
from penstock.rpc.shown.figures import Json, frame_of
from penstock.rpc.shown.plans import plan_names, plans_of
from penstock.rpc.shown.sessions import addresses, sessions_of
from penstock.v1 import router_pb2, router_pb2_grpc

FRESH_S = 1.0
"""For so long an answer is given again."""
MOST_SESSIONS = 100
_CALL_S = 3.0
_Found = TypeVar("_Found")


class Lately(Generic[_Found]):
    """One answer for all who want it within `FRESH_S`; those who come while it is asked for wait for it."""

    def __init__(self, ask: Callable[[], Awaitable[_Found]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._asked_at = -math.inf
        self._found: _Found | None = None
        self._lock = asyncio.Lock()

    async def get(self) -> _Found:
        """The answer. Raises what asking raises."""
        async with self._lock:
            now = self._clock()
            if self._found is None or now - self._asked_at >= FRESH_S:
                self._found = await self._ask()
                self._asked_at = now
            return self._found


class ShownMesh:
    """Asks the routers of a gateway."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._routers = sites.own.calls
        self._members = Lately(self._ask_members)
        self._sessions = Lately(self._ask_sessions)

    async def frame(self) -> Json:
        """Members with their loads, and what they did: the JSON of `penstock ctl top`. Raises PenstockError."""
        return frame_of(await self._members.get()).plain()

    async def sessions(self) -> Json:
        """The latest sessions: the JSON of `penstock ctl sessions`. Raises PenstockError."""
        return sessions_of(await self._sessions.get(), addresses(await self._members.get()), MOST_SESSIONS)

    async def explained(self, record: Json) -> Json:
        """A gateway's record of a request, with what routers weighed for it: the JSON of `penstock ctl explain`. Raises
        PenstockError."""
        names = plan_names(record)
        request = router_pb2.PlansRequest(plans=names)

        async def ask(stub: router_pb2_grpc.RouterAsyncStub) -> router_pb2.PlansResponse:
            return await stub.Plans(request, timeout=_CALL_S)

        plans = plans_of(await self._sites.of_all(ask)) if names else {}
        return {"request": record, "plans": plans, "members": addresses(await self._members.get())}

    async def _ask_members(self) -> router_pb2.MembersResponse:
        async def ask(stub: router_pb2_grpc.RouterAsyncStub) -> router_pb2.MembersResponse:
            return await stub.Members(router_pb2.MembersRequest(), timeout=_CALL_S)

        return await self._routers.of_first(ask)

    async def _ask_sessions(self) -> list[router_pb2.SessionsResponse]:
        request = router_pb2.SessionsRequest(most=MOST_SESSIONS)

        async def ask(stub: router_pb2_grpc.RouterAsyncStub) -> router_pb2.SessionsResponse:
            return await stub.Sessions(request, timeout=_CALL_S)

        return await self._routers.of_all(ask)
