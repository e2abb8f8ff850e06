"""What the gateway knows of the mesh: whether a request would succeed, and the layout that names its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import structlog

from penstock.errors import Unavailable
from penstock.kv.spec import KvSpec, spec_from_message
from penstock.rpc.channels import Channels
from penstock.v1 import router_pb2, router_pb2_grpc

_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Served:
    """The served model, as the router last described it."""

    spec: KvSpec
    max_model_len: int
    ready: bool


class Mesh:
    """Follows the router's view of one model; made by `open_mesh`."""

    def __init__(self, model: str, tokenizer: str) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._served: Served | None = None
        self._connected = False
        self._log = structlog.get_logger("penstock.gateway")
        self.changed = asyncio.Condition()

    @property
    def ready(self) -> bool:
        """Whether a request would succeed now."""
        return self._connected and self._served is not None and self._served.ready

    @property
    def known(self) -> Served | None:
        """What was last said of the model; kept while the router is away."""
        return self._served

    def served(self) -> Served:
        """The model, for a request. Raises Unavailable while no worker serves it."""
        if self._served is None:
            raise Unavailable("the model is not being served yet; try again later", code="not_ready", retry_after=1)
        return self._served

    async def until(self, ready: bool) -> None:
        """Returns when `self.ready` is what was asked."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.ready is ready)

    async def follow(self, channels: Channels, router: str) -> None:
        """Keeps watching; reconnects, ever more patiently, when the router goes away."""
        failures = 0
        while True:
            call = router_pb2_grpc.RouterStub(channels.to(router)).Watch(router_pb2.WatchRequest())
            try:
                async for view in call:
                    failures = 0
                    await self._update(view)
            except grpc.aio.AioRpcError as error:
                if failures == 0:
                    self._log.warning("router lost", code=error.code().name)
            finally:
                call.cancel()
            await self._set(False, self._served)
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            failures += 1

    async def _update(self, view: router_pb2.MeshView) -> None:
        found = next((model for model in view.models if model.name == self._model), None)
        served = None
        if found is None and view.models:
            self._log.warning("the mesh serves other models", wanted=self._model, served=[m.name for m in view.models])
        if found is not None:
            served = Served(spec_from_message(found.spec), found.max_model_len, found.ready)
            if served.spec.tokenizer != self._tokenizer:
                self._log.error(
                    "the workers' model has another tokenizer", here=self._tokenizer, there=served.spec.tokenizer
                )
                served = None
        await self._set(True, served)

    async def _set(self, connected: bool, served: Served | None) -> None:
        async with self.changed:
            self._connected, self._served = connected, served
            self.changed.notify_all()


@asynccontextmanager
async def open_mesh(channels: Channels, router: str, model: str, tokenizer: str) -> AsyncIterator[Mesh]:
    """A `Mesh` that follows the router for the length of the block."""
    mesh = Mesh(model, tokenizer)
    task = asyncio.get_running_loop().create_task(mesh.follow(channels, router))  # its parent is this function
    try:
        yield mesh
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
