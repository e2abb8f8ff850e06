"""How long a client over HTTP is willing to wait in all; gRPC has deadlines of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.errors import InvalidRequest

HEADER = "x-penstock-timeout"
_MOST_S = 86_400.0


def patience_s(headers: Mapping[str, str]) -> float:
    """Seconds from the request's first byte, as its header says; infinite without one. Raises InvalidRequest."""
    said = headers.get(HEADER)
    if said is None:
        return math.inf
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MOST_S:
        raise InvalidRequest(
            f"{HEADER}: {said[:40]!r} must be a number of seconds, more than 0 and at most {_MOST_S:.0f}", field=HEADER
        )
    return seconds
