"""Hints about a session that a client sends between its turns, without a request."""

from __future__ import annotations

import grpc

from penstock.gateway.mesh import wire
from penstock.gateway.mesh.faults import public_error
from penstock.kv.hint import ReturnHint
from penstock.rpc.channels import Channels
from penstock.rpc.context import outgoing
from penstock.v1 import router_pb2_grpc

_HINT_S = 2.0


async def send_hint(channels: Channels, router: str, session: str, hint: ReturnHint) -> None:
    """Tells the router, which tells every store. Raises Unavailable when it can't be reached."""
    stub = router_pb2_grpc.RouterStub(channels.to(router))
    try:
        await stub.Hint(wire.session_hint(session, hint), timeout=_HINT_S, metadata=outgoing())
    except grpc.aio.AioRpcError as error:
        raise public_error(error, "session hints cannot be passed on at the moment; try again") from error
