"""Connections to a Redis, of which few are left when nobody asks."""

from __future__ import annotations

from contextlib import suppress

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import RedisError

_IDLE = 4
MOST_CONNECTIONS = 1 << 16
"""Of a pool: redis-py refuses commands beyond a hundred at a time otherwise."""


class FewIdle(ConnectionPool):
    """As many connections as there are commands at a time; when they are over, those go that were used least lately but
    for a few. redis-py's own pool keeps all that there ever were, also those to a server that has ended."""

    async def release(self, connection: AbstractConnection) -> None:
        """See ConnectionPool."""
        await super().release(connection)
        if len(self._available_connections) > _IDLE:  # the last one is taken first
            with suppress(RedisError, OSError):
                await self._available_connections.pop(0).disconnect(nowait=True)
