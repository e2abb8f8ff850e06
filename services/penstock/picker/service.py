"""The ExternalProcessor servicer: translates messages and delegates to the lookout and the policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc

from penstock.errors import InvalidRequest, PenstockError, RateLimited, Unavailable
from penstock.picker import envoy
from penstock.picker.config import PickerConfig
from penstock.picker.looking import Lookout, MeshSight
from penstock.picker.metrics import PickerMetrics
from penstock.picker.picking import order
from penstock.rpc.channels import open_channels
from penstock.rpc.identity import MemberIdentity
from penstock.rpc.server import RpcServer, serve
from penstock.rpc.sessions import SESSION_HEADERS
from penstock.runtime.tasks import beside
from penstock.v1 import ext_proc_pb2, ext_proc_pb2_grpc

SERVICE = ext_proc_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
READINESS = "readiness"
LIVENESS = "liveness"
_GRACE_S = 10.0


class Pick:
    """One request: at which gateway it counts."""

    def __init__(self, waiting: Counter[str]) -> None:
        self._waiting = waiting
        self.at = ""

    def move(self, gateway: str) -> None:
        """It counts there from now on; empty: nowhere."""
        if self.at:
            self._waiting[self.at] -= 1
        self.at = gateway
        if gateway:
            self._waiting[gateway] += 1


class Picker(ext_proc_pb2_grpc.ExternalProcessorServicer):
    """Made by `open_picker`. Never reads a body: the headers say all that it needs to know."""

    def __init__(self, config: PickerConfig, lookout: Lookout, metrics: PickerMetrics) -> None:
        self._config = config
        self._lookout = lookout
        self._metrics = metrics
        self.waiting: Counter[str] = Counter()
        """Requests whose answer has not begun, by gateway."""

    @property
    def seen(self) -> MeshSight:
        """The mesh at the last look."""
        return self._lookout.seen

    async def Process(
        self,
        request_iterator: AsyncIterator[ext_proc_pb2.ProcessingRequest],
        context: grpc.aio.ServicerContext[ext_proc_pb2.ProcessingRequest, ext_proc_pb2.ProcessingResponse],
    ) -> AsyncIterator[ext_proc_pb2.ProcessingResponse]:
        """One HTTP request, from its headers to the end of what Envoy tells of it."""
        echo: dict[str, bool] | None = None
        with self._one_pick() as pick:
            async for request in request_iterator:
                echo = echo or envoy.echoes(request)
                kind = request.WhichOneof("request")
                if kind is None:
                    raise InvalidRequest("request: must have headers, a body or trailers", field="request")
                if kind == "request_headers":
                    try:
                        endpoints = self._pick(request)
                    except PenstockError as error:
                        self._metrics.picks.labels(error.code).inc()
                        yield envoy.refuse(error, error.http_status)
                        return
                    pick.move(endpoints[0])
                    self._metrics.picks.labels("placed").inc()
                    yield envoy.go_to(endpoints)
                    continue
                if kind == "response_headers":
                    self._look_where(request, pick)
                yield envoy.passed_on(request, echo)

    @contextmanager
    def _one_pick(self) -> Iterator[Pick]:
        pick = Pick(self.waiting)
        try:
            yield pick
        finally:
            pick.move("")

    def _pick(self, request: ext_proc_pb2.ProcessingRequest) -> list[str]:
        """Raises PenstockError for a request that no gateway would serve."""
        seen, allowed = self.seen, envoy.subset(request.metadata_context)
        gateways = [one for one in seen.gateways if allowed is None or one in allowed]
        if not gateways:
            raise Unavailable("no gateway takes requests now; try again later", code="no_endpoint", retry_after=1)
        if seen.queue_s is not None and seen.queue_s > self._config.max_queue_s:
            wait_s = seen.queue_s - self._config.max_queue_s
            raise RateLimited("all workers have too much to do; try again later", code="queue_full", retry_after=wait_s)
        given = envoy.headers(request.request_headers)
        session = next((given[name] for name in SESSION_HEADERS if given.get(name)), "")
        return order(gateways, self.waiting, session, self._config.most_over)

    def _look_where(self, request: ext_proc_pb2.ProcessingRequest, pick: Pick) -> None:
        """The answer begins: it waits no longer, wherever it comes from."""
        if (served := envoy.served(request.metadata_context)) is not None:
            self._metrics.served.labels("picked" if pick.at == served else "other").inc()
        pick.move("")


@dataclass(frozen=True)
class OpenPicker:
    """A picker that serves."""

    address: str
    picker: Picker
    metrics: PickerMetrics


@asynccontextmanager
async def open_picker(config: PickerConfig) -> AsyncIterator[OpenPicker]:
    """A picker that serves until the block ends."""
    metrics = PickerMetrics()
    member = MemberIdentity.of(config.member_tls, "picker")
    async with open_channels(member) as channels, open_channels() as doors:
        lookout = Lookout(config.router, config.look_s, channels, doors)
        picker = Picker(config, lookout, metrics)

        def register(server: grpc.aio.Server) -> None:
            ext_proc_pb2_grpc.add_ExternalProcessorServicer_to_server(picker, server)

        async with serve(
            config.address,
            register,
            [SERVICE, READINESS],
            max_calls=config.max_streams,
            grace=_GRACE_S,
            live_names=(LIVENESS,),
        ) as server:
            failed = metrics.task_failed
            async with (
                beside(lookout.follow, name="lookout", on_failure="restart", failed=failed),
                beside(lambda: _serve(lookout, server), name="readiness", on_failure="restart", failed=failed),
            ):
                yield OpenPicker(config.address.at(server.port), picker, metrics)


async def _serve(lookout: Lookout, server: RpcServer) -> None:
    """Takes requests as soon as it knows the mesh."""
    await lookout.answered.wait()
    await server.set_serving(True)
