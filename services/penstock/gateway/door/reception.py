"""The parts of the gateway that both HTTP and gRPC use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from penstock.gateway.accounts.admission import Admission
from penstock.gateway.accounts.auth import Auth
from penstock.gateway.accounts.ledger import UsageLedger
from penstock.gateway.accounts.limiter import Limiter
from penstock.gateway.api.responses.store import ResponseStore
from penstock.gateway.completing.models import Models
from penstock.gateway.completing.past import PastRequests
from penstock.gateway.completing.threads import Threads
from penstock.gateway.config import GatewayConfig
from penstock.gateway.door.drain import Drain
from penstock.gateway.mesh.view import RouterView
from penstock.runtime.metrics import GatewayMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    """The shared parts. A request passes them in this order: auth, admission, threads, models."""

    config: GatewayConfig
    auth: Auth
    admission: Admission
    ledger: UsageLedger
    limiter: Limiter
    threads: Threads
    models: Models
    past: PastRequests
    view: RouterView
    metrics: GatewayMetrics
    drain: Drain
    responses: ResponseStore
    started: int
    """Unix seconds at which the gateway began to serve."""

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """For the length of one request. Raises Overloaded, and Unavailable when the gateway stops."""
        with self.admission.one():
            async with self.drain.running():
                yield
