"""The first message of a member."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from penstock.errors import InvalidRequest
from penstock.v1 import router_pb2

_HELLO_S = 5.0


async def hello(requests: AsyncIterator[router_pb2.JoinRequest]) -> router_pb2.Hello:
    """Waits for it. Raises InvalidRequest."""
    try:
        async with asyncio.timeout(_HELLO_S):
            async for request in requests:
                if request.HasField("hello"):
                    return request.hello
                break
    except TimeoutError:
        pass
    raise InvalidRequest(f"send a hello first, within {_HELLO_S:.0f} s", field="hello")
