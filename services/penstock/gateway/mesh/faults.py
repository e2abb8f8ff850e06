"""The meaning of a failed call in the mesh, for the client and for the request's next step."""

from __future__ import annotations

import grpc

from penstock.errors import DeadlineExceeded, Internal, Overloaded, PenstockError, Unavailable
from penstock.rpc.errors import from_rpc
from penstock.rpc.interceptors import NOT_READ

TARGET_UNMET = "slo_unmet"
"""The router's code for a request that would not have its tokens in time: what it says is for the client."""
_CLIENTS_FAULT = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)


def blames_member(error: grpc.aio.AioRpcError) -> bool:
    """Whether another worker may succeed, because the transport or the worker failed and not the request."""
    return error.code() not in _CLIENTS_FAULT or from_rpc(error).code == NOT_READ


def public_error(error: grpc.aio.AioRpcError, unavailable: str) -> PenstockError:
    """The error for clients: without addresses of the mesh, and with `unavailable` as the text of transport errors."""
    found = from_rpc(error)
    if isinstance(found, DeadlineExceeded):
        return DeadlineExceeded("the request took too long", code="timeout")
    if isinstance(found, Overloaded) and found.code == TARGET_UNMET:
        return found
    if isinstance(found, Overloaded):
        what = "the mesh cannot accept more requests; try again later"
        return Overloaded(what, code="overloaded", retry_after=found.retry_after or 1)
    if isinstance(found, Unavailable) or error.code() is grpc.StatusCode.CANCELLED:
        return Unavailable(unavailable, code="unavailable", retry_after=found.retry_after or 1)
    if isinstance(found, Internal):
        return Internal("internal error")
    return found
