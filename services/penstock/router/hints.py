"""Messages that wait for members: the newest on each subject, bounded, dropped rather than waited for. And session
hints, which stores are told."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Hashable

from penstock.errors import PenstockError
from penstock.v1 import common_pb2, router_pb2


class Mailbox:
    """The messages that wait for one member, until `end`. Of several on one subject only the newest is kept."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._pending: OrderedDict[Hashable, router_pb2.JoinResponse] = OrderedDict()
        self._wake = asyncio.Event()
        self._ended = False
        self._reason: PenstockError | None = None
        self.dropped = 0
        """Messages for which there was no room."""

    def put(self, subject: Hashable, message: router_pb2.JoinResponse) -> None:
        """Adds one; the oldest hint makes room, or the oldest message where none waits: who misses a hint has nothing
        wrong."""
        self._pending.pop(subject, None)
        self._pending[subject] = message
        if len(self._pending) > self._most:
            hints = (name for name, one in self._pending.items() if one.HasField("session_hint"))
            del self._pending[next(hints, next(iter(self._pending)))]
            self.dropped += 1
        self._wake.set()

    def end(self, reason: PenstockError | None = None) -> None:
        """Nothing more is wanted; the first call's `reason` is the member's to hear."""
        if not self._ended:
            self._ended, self._reason = True, reason
        self._wake.set()

    async def read(self) -> AsyncIterator[router_pb2.JoinResponse]:
        """Each message as it comes; after `end`, whatever still waits, it returns or raises the reason."""
        while not self._ended:
            while self._pending and not self._ended:
                yield self._pending.popitem(last=False)[1]
            self._wake.clear()
            if not self._ended:
                await self._wake.wait()
        if self._reason is not None:
            raise self._reason


class LiveSessions:
    """Sessions that have a request now; tells which hints their requests cause."""

    def __init__(self) -> None:
        self._live: Counter[str] = Counter()

    def begin(self, session: str) -> common_pb2.SessionHint | None:
        """A request of the session begins; the hint that this causes. The caller owes one `end`."""
        if not session:
            return None
        self._live[session] += 1
        if self._live[session] > 1:
            return None
        return common_pb2.SessionHint(session=session, state=common_pb2.SESSION_STATE_ACTIVE)

    def end(self, session: str, last_words: common_pb2.SessionHint | None) -> common_pb2.SessionHint | None:
        """A request has ended; the hint that this causes, from its last words. None while others run."""
        if not session:
            return None
        self._live[session] -= 1
        if self._live[session]:
            return None
        del self._live[session]
        hint = common_pb2.SessionHint(state=common_pb2.SESSION_STATE_USER)
        hint.MergeFrom(last_words or common_pb2.SessionHint())
        hint.session = session
        return hint
