"""The one mapping of `penstock.errors` to and from gRPC."""

from __future__ import annotations

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from penstock import errors
from penstock.errors import PenstockError

_CODES: dict[type[PenstockError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.TooLarge: grpc.StatusCode.OUT_OF_RANGE,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Refused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RateLimited: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Internal: grpc.StatusCode.INTERNAL,
}
_BY_CODE = {code: error for error, code in _CODES.items()}
_DETAILS_KEY = "grpc-status-details-bin"
_WRITE_FAILED = "Internal error from Core"
"""What grpc.aio says, as INTERNAL, of a stream that had ended when a message was to be written to it."""


def status_code(error: PenstockError) -> grpc.StatusCode:
    """The code of the error's class, or of its nearest base that has one; INTERNAL for the rest."""
    return next((_CODES[base] for base in type(error).__mro__ if base in _CODES), grpc.StatusCode.INTERNAL)


def to_trailers(error: PenstockError) -> tuple[tuple[str, bytes], ...]:
    """`google.rpc.Status` with the field and the pause, as trailing metadata."""
    status = status_pb2.Status(code=status_code(error).value[0], message=error.message)
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


def is_raised(error: grpc.aio.AioRpcError) -> bool:
    """Whether the other side raised it; else it is what the transport made of its absence."""
    return any(key == _DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def from_rpc(error: grpc.aio.AioRpcError) -> PenstockError:
    """The error that the other side raised, or what the transport made of its absence."""
    kind = _BY_CODE.get(error.code(), errors.Internal)
    if kind is errors.Internal and error.details() == _WRITE_FAILED and not is_raised(error):
        kind = errors.Unavailable
    found = kind(error.details() or error.code().name)
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            _read_details(value, found)
    return found


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
