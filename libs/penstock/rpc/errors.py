"""Errors, named for the caller's next move, and their one mapping to and from gRPC and HTTP.

A message is written for the person who sent the request: it names the field, the value and what would be
right. It never carries a traceback, a path or an address of the mesh.
"""

from __future__ import annotations

from typing import ClassVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2


class PenstockError(Exception):
    """Base of all errors that may reach a caller."""

    grpc_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    """OpenAI's `error.type`."""

    def __init__(
        self, message: str, *, field: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code
        self.retry_after = retry_after


class InvalidRequest(PenstockError):
    """Send something else."""

    grpc_code, http_status, kind = grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"


class Unprocessable(InvalidRequest):
    """Well-formed, of the right types, and still impossible."""

    http_status = 422


class TooLarge(InvalidRequest):
    """Send less."""

    grpc_code, http_status = grpc.StatusCode.OUT_OF_RANGE, 413


class Unauthenticated(PenstockError):
    """Send a credential."""

    grpc_code, http_status, kind = grpc.StatusCode.UNAUTHENTICATED, 401, "authentication_error"


class NotFound(PenstockError):
    """Ask for something else."""

    grpc_code, http_status, kind = grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error"


class Refused(PenstockError):
    """The two sides do not fit together; repeating the call can't help."""

    grpc_code, http_status, kind = grpc.StatusCode.FAILED_PRECONDITION, 409, "invalid_request_error"


class Overloaded(PenstockError):
    """Come back after `retry_after` seconds."""

    grpc_code, http_status, kind = grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"


class Unavailable(PenstockError):
    """Try another place, or again later."""

    grpc_code, http_status, kind = grpc.StatusCode.UNAVAILABLE, 503, "server_error"


class DeadlineExceeded(PenstockError):
    """The caller's time is over."""

    grpc_code, http_status, kind = grpc.StatusCode.DEADLINE_EXCEEDED, 504, "server_error"


class Internal(PenstockError):
    """A fault of ours; the log holds the rest."""


_ERRORS: tuple[type[PenstockError], ...] = (
    InvalidRequest,
    TooLarge,
    Unauthenticated,
    NotFound,
    Refused,
    Overloaded,
    Unavailable,
    DeadlineExceeded,
    Internal,
)
_BY_CODE = {error.grpc_code: error for error in _ERRORS}
_DETAILS_KEY = "grpc-status-details-bin"


def to_trailers(error: PenstockError) -> tuple[tuple[str, bytes], ...]:
    """`google.rpc.Status` with the field and the pause, as trailing metadata."""
    status = status_pb2.Status(code=error.grpc_code.value[0], message=error.message)
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if error.code is not None:
        _attach(status, error_details_pb2.ErrorInfo(reason=error.code, domain="penstock"))
    if error.retry_after is not None:
        pause = Duration()
        pause.FromNanoseconds(int(error.retry_after * 1e9))
        _attach(status, error_details_pb2.RetryInfo(retry_delay=pause))
    return ((_DETAILS_KEY, status.SerializeToString()),)


def from_rpc(error: grpc.aio.AioRpcError) -> PenstockError:
    """The error that the other side raised, or what the transport made of its absence."""
    kind = _BY_CODE.get(error.code(), Internal)
    found = kind(error.details() or error.code().name)
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            _read_details(value, found)
    return found


def from_code(code: grpc.StatusCode, message: str) -> PenstockError:
    """The error of this tree for a bare status code."""
    return _BY_CODE.get(code, Internal)(message)


def _attach(
    status: status_pb2.Status,
    detail: error_details_pb2.BadRequest | error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo,
) -> None:
    packed = AnyMessage()
    packed.Pack(detail)
    status.details.append(packed)


def _read_details(packed: bytes, into: PenstockError) -> None:
    status = status_pb2.Status()
    try:
        status.ParseFromString(packed)
    except DecodeError:
        return
    for detail in status.details:
        bad, info, retry = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad) and bad.field_violations:
            into.field = bad.field_violations[0].field
        elif detail.Unpack(info):
            into.code = info.reason
        elif detail.Unpack(retry):
            into.retry_after = retry.retry_delay.ToNanoseconds() / 1e9
