"""What a router knows of the mesh, for people: members and what they say they did, gateways, sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import nlargest

from penstock.errors import InvalidRequest
from penstock.router import messages
from penstock.router.drafters import Drafters
from penstock.router.line import WaitingLine
from penstock.router.planner import Planner
from penstock.router.registry import Seat
from penstock.router.sessions import SessionHome
from penstock.rpc.bounds import check_address, check_count, check_name
from penstock.rpc.checkup import own_version
from penstock.v1 import router_pb2

MOST_SESSIONS = 1000
"""In one answer."""
_MOST_TIERS = 8
_MOST_WATCHERS = 256
_MOST_VERSION = 64


class Showing:
    """Members push what is shown here with their loads; no decision depends on it."""

    def __init__(
        self, planner: Planner, line: WaitingLine, drafters: Drafters, clock: Callable[[], float], *, router_id: str
    ) -> None:
        self._planner = planner
        self._line = line
        self._drafters = drafters
        self._clock = clock
        self._router_id = router_id
        self._counts: dict[Seat, router_pb2.WorkerCounts] = {}
        self._stores: dict[Seat, router_pb2.StoreLoad] = {}
        self._watchers: dict[int, router_pb2.MeshWatcher] = {}
        self._next = 0

    def counted(self, seat: Seat, counts: router_pb2.WorkerCounts) -> None:
        """A worker has done so much."""
        self._counts[seat] = counts

    def loaded(self, seat: Seat, load: router_pb2.StoreLoad) -> None:
        """A store has so much. Raises InvalidRequest."""
        if seat.member.role is not None:
            raise InvalidRequest("store: must come from a store, and this is a worker", field="store")
        check_count("store.tiers", load.tiers, _MOST_TIERS)
        self._stores[seat] = load

    def forget(self, seat: Seat) -> None:
        """A member has gone."""
        self._counts.pop(seat, None)
        self._stores.pop(seat, None)

    @contextmanager
    def watched(self, request: router_pb2.WatchRequest) -> Iterator[None]:
        """A gateway watches for the length of the block. Raises InvalidRequest, and Refused for another wire."""
        if not request.HasField("watcher"):
            yield
            return
        watcher = request.watcher
        check_address("watcher.address", watcher.address)
        check_address("watcher.http_address", watcher.http_address)
        check_name("watcher.version", watcher.version, most=_MOST_VERSION)
        messages.check_wire(f"the gateway at {watcher.address}", watcher.version, watcher.wire)
        self._next = number = self._next + 1
        if len(self._watchers) < _MOST_WATCHERS:
            self._watchers[number] = watcher
        try:
            yield
        finally:
            self._watchers.pop(number, None)

    def members(self, listed: Sequence[router_pb2.JoinedMember]) -> router_pb2.MembersResponse:
        """All members, with what they say of themselves."""
        self._planner.refresh()
        self._planner.homes.expire(self._clock())
        for told in listed:
            seat = self._planner.registry.get(told.member_id)
            if seat is not None:
                self._add(told, seat)
        return router_pb2.MembersResponse(
            members=listed,
            router_id=self._router_id,
            version=own_version(),
            sessions=len(self._planner.homes),
            requests=len(self._planner.ledger),
            held=len(self._line),
            indexed_blocks=len(self._planner.index),
            gateways=self._watchers.values(),
            drafts=self._drafters.listed(),
        )

    def _add(self, told: router_pb2.JoinedMember, seat: Seat) -> None:
        now, member = self._clock(), seat.member
        told.version, told.joined_s = member.version, now - seat.joined_at
        if seat in self._stores:
            told.store.CopyFrom(self._stores[seat])
        state = self._planner.state(member.id)
        if member.role is None or state is None:
            return
        measured = seat.measured
        told.max_running, told.kv_capacity_tokens = member.max_running, member.kv_capacity_tokens
        told.queue_s, told.heard_s = state.queue_s, now - seat.heard_at
        told.prefill_tokens_per_s = measured.prefill_rate
        if measured.base_s:
            told.decode_step_s = measured.step.seconds(max(1, seat.report.running), state.context_tokens)
        if seat in self._counts:
            told.counts.CopyFrom(self._counts[seat])

    def sessions(self, request: router_pb2.SessionsRequest) -> router_pb2.SessionsResponse:
        """The latest sessions. Raises InvalidRequest."""
        check_name("tenant", request.tenant)
        if request.most > MOST_SESSIONS:
            raise InvalidRequest(f"most = {request.most}: must be at most {MOST_SESSIONS}", field="most")
        self._planner.homes.expire(self._clock())
        found = (
            (at, key, home)
            for key, at, home in self._planner.homes.items()
            if request.tenant in ("", home.tenant) and key[1]
        )
        latest = nlargest(request.most or MOST_SESSIONS, found, key=lambda one: one[0])
        return router_pb2.SessionsResponse(
            sessions=[self._session(at, *key, home) for at, key, home in latest], known=len(self._planner.homes)
        )

    def _session(self, at: float, model: str, session: str, home: SessionHome) -> router_pb2.KnownSession:
        return router_pb2.KnownSession(
            session=session,
            tenant=home.tenant,
            model_name=model,
            prefill=home.prefill,
            decode=home.decode,
            age_s=max(0.0, self._clock() - at),
            prompt_tokens=home.prompt_tokens,
            answer_tokens=home.answer_tokens,
            cached_tokens=self._planner.cached_tokens(model, home),
            requests=home.requests,
        )
