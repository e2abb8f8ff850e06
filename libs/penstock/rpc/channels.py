"""Channels to the other services: one per address, shared, with keepalive, deadlines and safe retries."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
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
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)


class Channels:
    """Owns every outgoing channel of a process; made by `open_channels`."""

    def __init__(self, member: MemberIdentity | None = None) -> None:
        self.member = member
        """Who this process is to others; None where nobody asks."""
        self._open: dict[tuple[str, MemberRole], grpc.aio.Channel] = {}

    def to(self, address: str, role: MemberRole) -> grpc.aio.Channel:
        """The channel to `address` ("host:port", "unix:/path"); made on first use, closed with this object. As a member
        of a mesh with certificates, what listens at a host has to show one of `role`."""
        channel = self._open.get((address, role))
        if channel is None:
            channel = self._open[address, role] = self._made(address, role)
        return channel

    def _made(self, address: str, role: MemberRole) -> grpc.aio.Channel:
        if self.member is None or address.startswith(UNIX):
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        return MemberChannel(address, role, self.member, _OPTIONS)

    async def forget(self, address: str) -> None:
        """Closes the channels to a peer that has left."""
        for known in [known for known in self._open if known[0] == address]:
            await self._open.pop(known).close()

    async def close(self) -> None:
        """Closes all."""
        for address in {address for address, _ in self._open}:
            await self.forget(address)


@asynccontextmanager
async def open_channels(member: MemberIdentity | None = None) -> AsyncIterator[Channels]:
    """A `Channels` for the length of the block; `member`: who this process is, where others ask for certificates."""
    channels = Channels(member)
    try:
        yield channels
    finally:
        await channels.close()
