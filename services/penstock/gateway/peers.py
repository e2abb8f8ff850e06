"""Channels to workers, kept while they are of use."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from penstock.rpc.channels import Channels


class Peers:
    """Lends channels. One whose peer could not be reached is closed when nobody uses it any more: workers come back
    under other addresses, and gRPC would try the old one for ever."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._uses: Counter[str] = Counter()
        self._unreachable: set[str] = set()

    @asynccontextmanager
    async def at(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """The channel to `address`, for one call."""
        self._uses[address] += 1
        try:
            yield self._channels.to(address)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._unreachable.add(address)
            raise
        finally:
            self._uses[address] -= 1
            if self._uses[address] == 0:
                del self._uses[address]
                await self._close_unreachable(address)

    async def _close_unreachable(self, address: str) -> None:
        if address in self._unreachable:
            self._unreachable.discard(address)
            await self._channels.forget(address)
