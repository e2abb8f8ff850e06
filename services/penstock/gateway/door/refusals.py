"""Requests that were refused before they began: a short record for their tenant, and a count by reason."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from penstock.errors import PenstockError
from penstock.gateway.completing.past import PastRequests
from penstock.runtime.metrics import GatewayMetrics

_MOST = 256
_MOST_BYTES = 256 * 1024
_LONGEST = 200
"""Characters of a name or a message in a record: clients choose them."""


@dataclass(slots=True)
class Arrival:
    """A request at one of the doors."""

    request_id: str
    began: float = field(default_factory=time.perf_counter)
    """`time.perf_counter` at its first byte."""
    tenant: str = ""
    """Whose key it has; empty: it has no key that counts, or nobody has looked yet."""
    places: Sequence[Callable[[], None]] = ()
    """Free its places among all requests, and among those of its tenant."""
    begun: bool = False
    """Whether it runs, or has: then its completion accounts for it."""

    def leave(self) -> None:
        """Frees its places, before the client can know that it has ended."""
        for free in self.places:
            free()


class Refusals:
    """Remembers the last ones, apart from requests that ran: no flood of them pushes those out. Tenants share the room
    as they do for those."""

    def __init__(self, metrics: GatewayMetrics, most: int = _MOST) -> None:
        self.past = PastRequests(most, _MOST_BYTES)
        self._metrics = metrics

    @contextmanager
    def noted(self, arrival: Arrival) -> Iterator[None]:
        """Notes an error that ends the block before the request has begun; one without a tenant is only counted."""
        try:
            yield
        except PenstockError as error:
            if not arrival.begun:
                self._metrics.refused.labels(str(error.http_status), error.code or error.kind).inc()
                if arrival.tenant:
                    record = msgspec.json.encode(_record(arrival, error))
                    self.past.add(arrival.tenant, arrival.request_id, secrets.token_hex(12), record)
            raise


def _record(arrival: Arrival, error: PenstockError) -> dict[str, object]:
    return {
        "object": "request",
        "request_id": arrival.request_id,
        "tenant": arrival.tenant,
        "created": int(time.time()),
        "status": "refused",
        "http_status": error.http_status,
        "error": {
            "type": error.kind,
            "code": error.code,
            "param": error.field and error.field[:_LONGEST],
            "message": error.message[:_LONGEST],
        },
    }
