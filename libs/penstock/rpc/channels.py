"""Channels to the other services: one per address, shared, with keepalive, deadlines and safe retries."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from penstock.rpc.server import KEEPALIVE, MAX_MESSAGE

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

    def __init__(self) -> None:
        self._open: dict[str, grpc.aio.Channel] = {}

    def to(self, address: str) -> grpc.aio.Channel:
        """The channel to `address` ("host:port", "unix:/path"); made on first use, closed with this object."""
        channel = self._open.get(address)
        if channel is None:
            channel = self._open[address] = grpc.aio.insecure_channel(address, options=_OPTIONS)
        return channel

    async def forget(self, address: str) -> None:
        """Closes the channel to a peer that has left."""
        channel = self._open.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Closes all."""
        for address in list(self._open):
            await self.forget(address)


@asynccontextmanager
async def open_channels() -> AsyncIterator[Channels]:
    """A `Channels` for the length of the block."""
    channels = Channels()
    try:
        yield channels
    finally:
        await channels.close()
