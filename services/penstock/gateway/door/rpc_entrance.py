"""What gRPC calls pass before their messages are read: the key; those that generate also limits and admission."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from penstock.gateway.door.operating import check_operator
from penstock.gateway.door.reception import Reception
from penstock.gateway.door.refusals import Arrival
from penstock.rpc.checkup import CHECKUP
from penstock.runtime.context import current_request_id, request_scope
from penstock.v1 import gateway_pb2

SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name
_GENERATING = frozenset(f"/{SERVICE}/{name}" for name in ("ChatCompletion", "Completion"))
_ARRIVAL: ContextVar[Arrival] = ContextVar("arrival")


def current_arrival() -> Arrival:
    """The admitted request that this task works for."""
    return _ARRIVAL.get()


class RpcEntrance:
    """The gateway's entrance for `serve`."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception

    @asynccontextmanager
    async def __call__(self, method: str, metadata: Iterable[tuple[str, Any]], _context: Any) -> AsyncIterator[None]:
        """For the length of one call. Raises what `Reception.one` raises."""
        headers = texts(metadata)
        if method.startswith(f"/{CHECKUP}/"):
            check_operator(self._reception, headers)
        if method not in _GENERATING:
            self._reception.auth.identify(headers)
            yield
            return
        arrival = Arrival(current_request_id() or f"req-{secrets.token_hex(12)}")
        async with self._reception.one(headers, arrival):
            with request_scope(arrival.request_id):
                _ARRIVAL.set(arrival)
                yield


def texts(metadata: Iterable[tuple[str, Any]]) -> Mapping[str, str]:
    """The text entries of a call's metadata."""
    return {key: value for key, value in metadata if isinstance(value, str)}
