"""What a session does next: said by its client, or seen by how its answer ended."""

from __future__ import annotations

import grpc

from penstock.gateway.faults import public_error
from penstock.kv.hint import ReturnHint
from penstock.rpc.channels import Channels
from penstock.rpc.context import outgoing
from penstock.v1 import common_pb2, router_pb2_grpc

_HINT_S = 2.0


def closing_hint(outlook: ReturnHint, *, waits_for_tool: bool) -> common_pb2.SessionHint:
    """At the end of a request. Its session is that of the request's plan."""
    if outlook.ended:
        state = common_pb2.SESSION_STATE_ENDED
    else:
        state = common_pb2.SESSION_STATE_TOOL if waits_for_tool else common_pb2.SESSION_STATE_USER
    return common_pb2.SessionHint(state=state, returns_in_s=outlook.returns_at)


async def send_hint(channels: Channels, router: str, session: str, outlook: ReturnHint) -> None:
    """Without a request. Raises Unavailable."""
    state = common_pb2.SESSION_STATE_ENDED if outlook.ended else common_pb2.SESSION_STATE_UNSPECIFIED
    hint = common_pb2.SessionHint(session=session, state=state, returns_in_s=outlook.returns_at)
    stub = router_pb2_grpc.RouterStub(channels.to(router))
    try:
        await stub.Hint(common_pb2.HintRequest(hints=[hint]), timeout=_HINT_S, metadata=outgoing())
    except grpc.aio.AioRpcError as error:
        raise public_error(error, "hints can't be passed on now") from error
