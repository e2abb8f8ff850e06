"""Channels to the other services: one per address, shared, with keepalive, deadlines and safe retries."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

from penstock.rpc.identity import MemberIdentity, MemberRole
from penstock.rpc.member_channel import MemberChannel
from penstock.rpc.server import KEEPALIVE, MAX_MESSAGE
from penstock.runtime.addresses import UNIX

# Other calls are not retried here: the gateway plans again when a worker or the router cannot take a request.
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": "penstock.v1.KvStore"}, {"service": "penstock.v1.Draft"}],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.02s",
                    "maxBackoff": "0.2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)

_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.service_config", _SERVICE_CONFIG),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    *KEEPALIVE,
    ("grpc.http2.max_pings_without_data", 0),  # else a stream on which nothing is said is hardly looked after
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)

IDLE_S = 300.0
"""A channel that was lent stays for so long after its last use, for the next one."""
MOST_IDLE = 1024
"""Channels that were lent and that nobody uses: more than most meshes have workers, as each costs a connection when it
is used again."""

_Peer = tuple[str, MemberRole]


class Channels:
    """Owns every outgoing channel of a process; made by `open_channels`."""

    def __init__(self, member: MemberIdentity | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.member = member
        """Who this process is to others; None where nobody asks."""
        self._clock = clock
        self._open: dict[_Peer, grpc.aio.Channel] = {}
        self._kept: set[_Peer] = set()
        """Those that somebody has for good."""
        self._users: Counter[_Peer] = Counter()
        """Of those that are lent."""
        self._idle: dict[_Peer, float] = {}
        """Those that were lent and have no user, and since when: the one that is so for longest first."""

    def __len__(self) -> int:
        return len(self._open)

    def to(self, address: str, role: MemberRole) -> grpc.aio.Channel:
        """The channel to `address` ("host:port", "unix:/path"); made on first use, closed with this object. As a member
        of a mesh with certificates, what listens at a host has to show one of `role`."""
        peer = address, role
        self._kept.add(peer)
        self._idle.pop(peer, None)
        return self._to(peer)

    @asynccontextmanager
    async def lent(self, address: str, role: MemberRole) -> AsyncIterator[grpc.aio.Channel]:
        """As `to`, for the length of the block: for peers that come and go. A channel that nobody uses is closed with
        the first loan after `IDLE_S`, or when `MOST_IDLE` others have been idle for less long."""
        peer = address, role
        self._users[peer] += 1
        self._idle.pop(peer, None)
        try:
            await self._close_idle()
            yield self._to(peer)
        finally:
            self._users[peer] -= 1
            if not self._users[peer]:
                del self._users[peer]
                if peer in self._open and peer not in self._kept:
                    self._idle[peer] = self._clock()

    async def _close_idle(self) -> None:
        late = self._clock() - IDLE_S
        while self._idle and (len(self._idle) > MOST_IDLE or next(iter(self._idle.values())) < late):
            peer = next(iter(self._idle))
            del self._idle[peer]
            await self._open.pop(peer).close()

    def _to(self, peer: _Peer) -> grpc.aio.Channel:
        channel = self._open.get(peer)
        if channel is None:
            channel = self._open[peer] = self._made(*peer)
        return channel

    def _made(self, address: str, role: MemberRole) -> grpc.aio.Channel:
        if self.member is None or address.startswith(UNIX):
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        return MemberChannel(address, role, self.member, _OPTIONS)

    async def forget(self, address: str) -> None:
        """Closes the channels to a peer that has left."""
        for known in [known for known in self._open if known[0] == address]:
            self._kept.discard(known)
            self._idle.pop(known, None)
            await self._open.pop(known).close()

    async def close(self) -> None:
        """Closes all."""
        for address in dict.fromkeys(address for address, _ in self._open):
            await self.forget(address)


@asynccontextmanager
async def open_channels(member: MemberIdentity | None = None) -> AsyncIterator[Channels]:
    """A `Channels` for the length of the block; `member`: who this process is, where others ask for certificates."""
    channels = Channels(member)
    try:
        yield channels
    finally:
        await channels.close()
