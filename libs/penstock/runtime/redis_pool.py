"""Connections to a Redis, of which few are left when nobody asks."""

from __future__ import annotations

from redis.asyncio.connection import AbstractConnection, ConnectionPool

_IDLE = 4


class FewIdle(ConnectionPool):
    """As many connections as there are commands at a time; of those that are over, a few keep theirs. redis-py's own
    pool keeps all that there ever were, also those to a server that has ended."""

    async def release(self, connection: AbstractConnection) -> None:
        """See ConnectionPool."""
        idle = self._available_connections
        enough = sum(one.is_connected for one in idle) >= _IDLE
        if enough:
            connection.mark_for_reconnect()  # type: ignore[no-untyped-call]
        await super().release(connection)
        if enough and connection in idle:  # behind those that are connected: the last is taken first
            idle.remove(connection)
            idle.insert(0, connection)
