"""Knowledge about sessions: whether and why they wait, and when they are likely to come back.

Pure: no clock, no socket. Bounded: the sessions of which nothing was heard longest are forgotten. It is fed by
hints, which may be lost or wrong, and by the leases that sessions make; it is read by the eviction policy and by
the mover of blocks. Whatever it says, tokens are the same.

The gap between a hint that a session waits and its next use is learned, for each session and over all,
apart for those that wait for a tool and for those that wait for their user. Gaps range over decades, so it is their
logarithms that are averaged: the expected gap is the geometric mean, and one long lunch doesn't spoil it. Nothing is
expected before something was learned.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

_MEMORY = 16
"""Gaps that a running mean remembers, about."""
_TRUST = 2.0
"""How many gaps of its own a session needs to count as much as all others together."""
_LEAST_GAP_S = 1e-3
_SLACK = 64


class SessionPhase(Enum):
    """The activity of a session."""

    ACTIVE = 1
    """A request of it runs."""
    TOOL = 2
    """It waits for a tool."""
    USER = 3
    """It waits for its user."""
    ENDED = 4
    """It was said to be over. It may come back all the same."""


@dataclass(frozen=True, slots=True)
class KnownSession:
    """The store's expectation of a session."""

    state: SessionPhase
    since: float
    """When it was last said to be in this state, in seconds of the caller's clock."""
    expected_at: float
    """When it is likely to be back; infinity: unknown, or it has ended. It may be in the past."""


@dataclass(slots=True)
class _Mean:
    """A running mean that forgets slowly."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, _MEMORY)


@dataclass(slots=True)
class _Entry:
    state: SessionPhase
    since: float
    expected_at: float = math.inf
    gaps: dict[SessionPhase, _Mean] = field(default_factory=dict)


class AwaitedSessions:
    """The sessions of a table that are expected, for one who brings their blocks; made by `SessionTable.awaited`."""

    def __init__(self, entries: Mapping[str, _Entry], now: float) -> None:
        """Those that should have come by `now` are not awaited."""
        self._entries = entries
        self._told: set[str] = set()
        """Named by `due` since something new was known of them."""
        self._expected: list[tuple[float, str]] = []
        for session, entry in entries.items():
            if entry.expected_at > now:
                self.changed(session, entry)

    def changed(self, session: str, entry: _Entry) -> None:
        """Something new is known of a session."""
        self._told.discard(session)
        if entry.expected_at < math.inf:
            heapq.heappush(self._expected, (entry.expected_at, session))
            if len(self._expected) > 2 * len(self._entries) + _SLACK:
                self._told &= self._entries.keys()
                self._expected = list(self._live())
                heapq.heapify(self._expected)

    def due(self, now: float, ahead_s: float) -> list[str]:
        """Sessions expected back within `ahead_s`, each once per wait, the earliest first."""
        found = []
        while self._expected and self._expected[0][0] <= now + ahead_s:
            expected_at, session = heapq.heappop(self._expected)
            entry = self._entries.get(session)
            if entry is not None and entry.expected_at == expected_at and session not in self._told:
                self._told.add(session)
                found.append(session)
        if len(self._told) > 2 * len(self._entries) + _SLACK:
            self._told &= self._entries.keys()
        return found

    def next_due(self) -> float:
        """When the next session is expected that `due` has not returned yet; infinity: none."""
        return self._expected[0][0] if self._expected else math.inf

    def _live(self) -> Iterable[tuple[float, str]]:
        for session, entry in self._entries.items():
            if entry.expected_at < math.inf and session not in self._told:
                yield entry.expected_at, session


class SessionTable:
    """At most `most` sessions. Times are seconds of any clock that does not go back."""

    def __init__(self, most: int = 100_000, *, listeners: Sequence[Callable[[str], None]] = ()) -> None:
        """`listeners` are called as those of `heard_by`, for ever."""
        self._most = most
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._overall = {SessionPhase.TOOL: _Mean(), SessionPhase.USER: _Mean()}
        self._awaited: list[AwaitedSessions] = []
        self._listeners = list(listeners)

    def __len__(self) -> int:
        return len(self._entries)

    def used(self, session: str, now: float) -> None:
        """A request of it has begun, or asks for blocks. Ends a wait, which teaches how long waits are."""
        if not session:
            return
        entry = self._entry(session, now)
        if entry.state is SessionPhase.ACTIVE:
            return
        if entry.state in self._overall:
            gap = math.log(max(_LEAST_GAP_S, now - entry.since))
            self._overall[entry.state].add(gap)
            entry.gaps.setdefault(entry.state, _Mean()).add(gap)
        self._change(session, entry, SessionPhase.ACTIVE, now, math.inf)

    def hint(self, session: str, state: SessionPhase | None, now: float, returns_in: float | None = None) -> None:
        """A hint: what the session does, and perhaps in how many seconds it comes back.

        Without a state it stays in the one it has; if it had ended, it waits for its user now.
        """
        if not session:
            return
        entry = self._entry(session, now)
        if state is None:
            state = SessionPhase.USER if entry.state is SessionPhase.ENDED else entry.state
        gap = self._gap(entry, state) if returns_in is None or state is SessionPhase.ENDED else returns_in
        self._change(session, entry, state, now, now + gap)

    @contextmanager
    def heard_by(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Calls the listener with each session of which something new is known, for the length of the block."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    @contextmanager
    def awaited(self, now: float) -> Iterator[AwaitedSessions]:
        """The sessions that are expected from now on, for the length of the block: several may each bring what they
        have of one."""
        found = AwaitedSessions(self._entries, now)
        self._awaited.append(found)
        try:
            yield found
        finally:
            self._awaited.remove(found)

    def known(self, session: str) -> KnownSession | None:
        """Returns the expectation of a session; None: it is unknown."""
        entry = self._entries.get(session)
        return KnownSession(entry.state, entry.since, entry.expected_at) if entry is not None else None

    def _entry(self, session: str, now: float) -> _Entry:
        entry = self._entries.get(session)
        if entry is None:
            entry = self._entries[session] = _Entry(SessionPhase.ENDED, now)
            if len(self._entries) > self._most:
                self._entries.popitem(last=False)
        self._entries.move_to_end(session)
        return entry

    def _change(self, session: str, entry: _Entry, state: SessionPhase, now: float, expected_at: float) -> None:
        entry.state, entry.since, entry.expected_at = state, now, expected_at
        for awaited in self._awaited:
            awaited.changed(session, entry)
        for listener in self._listeners:
            listener(session)

    def _gap(self, entry: _Entry, state: SessionPhase) -> float:
        """The usual gap, of this session as far as it is known, else of all; infinity: nothing is known."""
        overall = self._overall.get(state)
        if overall is None or not overall.count:
            return math.inf
        own = entry.gaps.get(state, _Mean())
        return math.exp((own.count * own.value + _TRUST * overall.value) / (own.count + _TRUST))
