"""Checks of message fields that every service makes. Each raises InvalidRequest that names the field, the value and the
right form. Block keys and namespaces are checked by `penstock.kv.bounds`."""

from __future__ import annotations

import math
import re
from collections.abc import Sized

from penstock.errors import InvalidRequest
from penstock.runtime.addresses import HostPort, SocketAddress, socket_address

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_NAME = 512
_MAX_SESSION = 64
_SHOWN = 80


def is_id(text: str) -> bool:
    """Whether `text` may be used as an id in logs, labels and metadata."""
    return _ID.fullmatch(text) is not None


def check_id(field: str, text: str) -> None:
    """The id of a member, a request or a stream."""
    if not is_id(text):
        raise bad(field, _shown(text), "must be 1 to 128 letters, digits or . _ : -")


def check_name(field: str, text: str, *, least: int = 0, most: int = _MAX_NAME) -> None:
    """A short text; `least` and `most` are characters."""
    if not least <= len(text) <= most:
        right = f"at most {most}" if least == 0 else f"{least} to {most}"
        raise bad(field, f"{len(text)} characters", f"must have {right}")


def check_session(field: str, digest: str) -> None:
    """A session's digest, or nothing."""
    check_name(field, digest, most=_MAX_SESSION)


def check_address(field: str, text: str) -> SocketAddress:
    """Where a peer may be reached: host:port with a port that is not 0, or a Unix socket of this host."""
    check_name(field, text, least=1)
    try:
        address = socket_address(text)
    except ValueError:
        address = None
    if address is None or (isinstance(address, HostPort) and address.port == 0):
        raise bad(field, _shown(text), "must be host:port, for example 127.0.0.1:7401, or unix:/path")
    return address


def check_count(field: str, items: Sized, most: int) -> None:
    """A list of at most `most` entries."""
    if len(items) > most:
        raise bad(field, f"{len(items)} entries", f"must have at most {most}")


def check_length(field: str, value: bytes, *lengths: int) -> None:
    """Bytes of one of the `lengths`."""
    if len(value) not in lengths:
        raise bad(field, f"{len(value)} bytes", f"must have {' or '.join(map(str, lengths))}")


def check_seconds(field: str, seconds: float) -> None:
    """A length of time."""
    if not 0 <= seconds < math.inf:  # also false for a NaN
        raise bad(field, str(seconds), "must be a number of seconds, 0 or more")


def bad(field: str, value: str, right: str) -> InvalidRequest:
    """The error that all these checks raise."""
    return InvalidRequest(f"{field} = {value}: {right}", field=field)


def _shown(text: str) -> str:
    """A client's text, for a message: short, and without control characters."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
