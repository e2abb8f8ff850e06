"""The gateway's view of the mesh, as the router reports it: the served model and workers that have fallen silent."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import structlog

from penstock.errors import Unavailable
from penstock.kv.spec import KvSpec, spec_from_message
from penstock.rpc.channels import Channels
from penstock.rpc.stay import Connection, Pauses, stay
from penstock.runtime.tasks import Failed, beside
from penstock.v1 import router_pb2, router_pb2_grpc

_PAUSES = Pauses(longest=1.0)


@dataclass(frozen=True, slots=True)
class ModelView:
    """The served model, as the router last described it."""

    spec: KvSpec
    max_model_len: int
    ready: bool
    """Workers are joined that could take a request."""


class RouterView:
    """Follows the router's view of one model; made by `open_view`."""

    def __init__(self, model: str, tokenizer: str) -> None:
        self._name = model
        self._tokenizer = tokenizer
        self._model: ModelView | None = None
        self._connected = False
        self._silent: frozenset[str] = frozenset()
        self._calls: defaultdict[str, set[Callable[[], object]]] = defaultdict(set)
        """For each member, the functions that cancel the running calls to it."""
        self._log = structlog.get_logger("penstock.gateway")
        self.changed = asyncio.Condition()

    @property
    def ready(self) -> bool:
        """Whether a request would succeed now."""
        return self._connected and self._model is not None and self._model.ready

    @property
    def known(self) -> ModelView | None:
        """The router's last description of the model, kept while the router is away; None before the first."""
        return self._model

    async def model(self, patience_s: float) -> ModelView:
        """The model, for a request. Raises Unavailable when no worker serves it within `patience_s`."""
        try:
            async with asyncio.timeout(patience_s), self.changed:
                await self.changed.wait_for(lambda: self._model is not None)
        except TimeoutError:
            pass
        if self._model is None:
            raise Unavailable("the model is not being served yet; try again later", code="not_ready", retry_after=1)
        return self._model

    async def until(self, ready: bool) -> None:
        """Returns when `self.ready` equals `ready`."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.ready is ready)

    async def hopeful(self, pause_s: float) -> None:
        """For a request that found no workers: returns when it may find some, after `pause_s` at the earliest.

        The pause is for a view that is ready although the caller has seen a worker fail: the router may not have.
        """
        await asyncio.sleep(pause_s)
        await self.until(True)

    @contextmanager
    def heard(self, member: str, end: Callable[[], object]) -> Iterator[None]:
        """Within the block, calls `end` when the router has not heard from `member` for too long."""
        self._calls[member].add(end)
        if member in self._silent:
            end()
        try:
            yield
        finally:
            self._calls[member].discard(end)
            if not self._calls[member]:
                del self._calls[member]

    async def follow(self, channels: Channels, router: str) -> None:
        """Keeps watching; reconnects, ever more patiently, when the router goes away."""

        async def watch(connection: Connection) -> None:
            call = router_pb2_grpc.RouterStub(channels.to(router)).Watch(router_pb2.WatchRequest())
            try:
                async for view in call:
                    connection.established = True
                    await self._update(view)
            finally:
                call.cancel()
                await self._set(False, self._model)

        await stay(watch, peer="router", log=self._log, pauses=_PAUSES)

    async def _update(self, view: router_pb2.MeshView) -> None:
        found = next((model for model in view.models if model.name == self._name), None)
        model = None
        if found is None and view.models:
            self._log.warning("the mesh serves other models", wanted=self._name, served=[m.name for m in view.models])
        if found is not None:
            model = ModelView(spec_from_message(found.spec), found.max_model_len, found.ready)
            if model.spec.tokenizer != self._tokenizer:
                self._log.error(
                    "the workers' model has another tokenizer", here=self._tokenizer, there=model.spec.tokenizer
                )
                model = None
        self._hear(frozenset(view.silent))
        await self._set(True, model)

    def _hear(self, silent: frozenset[str]) -> None:
        """Ends the calls to members that have fallen silent: they may hang for as long as TCP lets them."""
        for member in silent - self._silent:
            if calls := list(self._calls.get(member, ())):
                self._log.warning("worker is silent, ending calls to it", member=member, calls=len(calls))
            for end in calls:
                end()
        self._silent = silent

    async def _set(self, connected: bool, model: ModelView | None) -> None:
        async with self.changed:
            self._connected, self._model = connected, model
            self.changed.notify_all()


@asynccontextmanager
async def open_view(
    channels: Channels, router: str, *, model: str, tokenizer: str, failed: Failed
) -> AsyncIterator[RouterView]:
    """A view that follows the router for the length of the block. `failed` counts defects, which restart it."""
    view = RouterView(model, tokenizer)
    async with beside(lambda: view.follow(channels, router), name="router view", on_failure="restart", failed=failed):
        yield view
