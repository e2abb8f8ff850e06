"""`grpc.health.v1`, whose watchers do not hold up a server that stops."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):
    """Answers for names that were `set`. Belongs to one event loop."""

    def __init__(self) -> None:
        self._well: dict[str, bool] = {}
        self._news = asyncio.Event()
        self._over = False

    def set(self, name: str, well: bool) -> None:
        """From now on the answer for `name` is SERVING, or NOT_SERVING."""
        self._well[name] = well
        self._tell()

    def end(self) -> None:
        """Nothing changes any more: watchers are told what is new, and their streams end."""
        self._over = True
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _answer(self, name: str) -> health_pb2.HealthCheckResponse:
        well = self._well.get(name)
        return health_pb2.HealthCheckResponse(status=_UNKNOWN if well is None else _SERVING if well else _NOT_SERVING)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._well:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.service!r} is no service of this server")
        return self._answer(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        told = None
        while True:
            news, over = self._news, self._over
            if (answer := self._answer(request.service)) != told:
                told = answer
                await context.write(answer)
            elif over:
                return
            else:
                await news.wait()
