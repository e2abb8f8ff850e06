"""The parts of the gateway that both HTTP and gRPC use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from penstock.gateway.accounts.admission import Admission
from penstock.gateway.accounts.auth import Auth
from penstock.gateway.accounts.ledger import UsageLedger
from penstock.gateway.accounts.limiter import Limiter
from penstock.gateway.api.responses.store import ResponseStore
from penstock.gateway.batches.desk import BatchDesk
from penstock.gateway.completing.models import Models
from penstock.gateway.completing.past import PastRequests
from penstock.gateway.completing.threads import Threads
from penstock.gateway.config import GatewayConfig
from penstock.gateway.door.drain import Drain
from penstock.gateway.door.refusals import Arrival, Refusals
from penstock.gateway.mesh.sites import Sites
from penstock.gateway.mesh.view import RouterView
from penstock.runtime.metrics import GatewayMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    """The shared parts. A request passes them in this order: auth, limiter and admission, threads, models."""

    config: GatewayConfig
    auth: Auth
    admission: Admission
    ledger: UsageLedger
    limiter: Limiter
    threads: Threads
    models: Models
    past: PastRequests
    refusals: Refusals
    view: RouterView
    sites: Sites
    metrics: GatewayMetrics
    drain: Drain
    responses: ResponseStore
    batches: BatchDesk | None
    """None: files and batches are not kept here."""
    started: int
    """Unix seconds at which the gateway began to serve."""

    @asynccontextmanager
    async def one(self, headers: Mapping[str, str], arrival: Arrival) -> AsyncIterator[str]:
        """For the length of one request of the tenant that it gives.

        The key comes first: who has none learns nothing of the gateway, and costs it the digest of what was sent.
        Raises Unauthenticated, Forbidden, RateLimited, Overloaded, and Unavailable when the gateway stops.
        """
        with self.refusals.noted(arrival), self.admission.counted():
            who = self.auth.identify(headers)
            arrival.tenant = who.tenant
            tenant = who.client()
            async with self.drain.running():
                with self._admitted(tenant, arrival):
                    yield tenant

    @contextmanager
    def _admitted(self, tenant: str, arrival: Arrival) -> Iterator[None]:
        """A place among the tenant's requests, and one among all; who is refused has taken neither."""
        self.limiter.check(tenant)
        with self.admission.one(tenant) as leave, self.limiter.one(tenant) as leave_tenant:
            arrival.places = (leave, leave_tenant)
            yield
