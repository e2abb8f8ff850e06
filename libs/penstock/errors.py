"""Errors, named for the caller's next move. Nothing here knows of gRPC: `penstock.rpc.errors` maps them.

A message is written for the person who sent the request: it names the field, the value and what would be
right. It never carries a traceback, a path or an address of the mesh.
"""

from __future__ import annotations

from typing import ClassVar


class PenstockError(Exception):
    """Base of all errors that may reach a caller."""

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


def forget_way(error: BaseException | None) -> None:
    """Takes from an error that was handled, and from those behind it, the frames through which they came: these hold
    all that the request had, in circles that only the garbage collector finds."""
    while error is not None:
        behind = error.__context__
        error.__traceback__ = error.__context__ = None
        error = behind


class InvalidRequest(PenstockError):
    """Send something else."""

    http_status, kind = 400, "invalid_request_error"


class Unprocessable(InvalidRequest):
    """Well-formed, of the right types, and still impossible."""

    http_status = 422


class TooLarge(InvalidRequest):
    """Send less."""

    http_status = 413


class UnsupportedEncoding(InvalidRequest):
    """Send it in another form."""

    http_status = 415


class Unauthenticated(PenstockError):
    """Send a credential."""

    http_status, kind = 401, "authentication_error"


class Forbidden(PenstockError):
    """The credential is good, and not for this."""

    http_status, kind = 403, "permission_error"


class NotFound(PenstockError):
    """Ask for something else."""

    http_status, kind = 404, "invalid_request_error"


class Refused(PenstockError):
    """The two sides do not fit together; repeating the call can't help."""

    http_status, kind = 409, "invalid_request_error"


class RateLimited(PenstockError):
    """The caller has used up what it may have; come back after `retry_after` seconds."""

    http_status, kind = 429, "rate_limit_error"


class Overloaded(PenstockError):
    """The mesh has no room now, whoever asks; come back after `retry_after` seconds."""

    http_status, kind = 503, "server_error"


class Unavailable(PenstockError):
    """Try another place, or again later."""

    http_status, kind = 503, "server_error"


class DeadlineExceeded(PenstockError):
    """The caller's time is over."""

    http_status, kind = 504, "server_error"


class Internal(PenstockError):
    """A fault of ours; the log holds the rest."""
