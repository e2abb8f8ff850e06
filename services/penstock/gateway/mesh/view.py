"""The gateway's view of the mesh, as a router reports it: the served models and workers that have fallen silent."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

import structlog

from penstock.errors import Unavailable
from penstock.gateway.mesh.choosing import RouterChoice
from penstock.kv.spec import KvSpec, spec_from_message
from penstock.rpc.channels import Channels
from penstock.rpc.stay import Connection, Pauses, stay
from penstock.runtime.tasks import Failed, beside, first_of
from penstock.v1 import router_pb2, router_pb2_grpc

_PAUSES = Pauses(longest=1.0)


@dataclass(frozen=True, slots=True)
class ModelView:
    """A served model, as the router last described it."""

    spec: KvSpec
    max_model_len: int
    ready: bool
    """Workers are joined that could take a request."""
    adapter: str = ""
    """The fingerprint of the adapter that is added to the model `base`; empty: none."""
    base: str = ""


class RouterView:
    """Follows every router's view of this gateway's models, and believes the one that it plans with: of its own site,
    unless no worker is there. Made by `open_view`."""

    def __init__(
        self,
        tokenizers: Mapping[str, str],
        sites: Mapping[str, Sequence[str]],
        own: asyncio.Future[router_pb2.MeshWatcher],
    ) -> None:
        """`tokenizers` has the fingerprint of each model's tokenizer, by the model's name; `sites` the addresses of the
        routers of each site, this gateway's first; `own` says where this gateway is, once that is known."""
        self._own = own
        self._sites: dict[str, RouterChoice[router_pb2.MeshView]] = {
            site: RouterChoice(routers) for site, routers in sites.items()
        }
        self._tokenizers = tokenizers
        self._models: Mapping[str, ModelView] = {}
        self._missing: frozenset[str] = frozenset()
        self._connected = False
        self._silent: frozenset[str] = frozenset()
        self._calls: defaultdict[str, dict[Callable[[], object], None]] = defaultdict(dict)
        """For each member, the functions that cancel the running calls to it."""
        self._log = structlog.get_logger("penstock.gateway")
        self.changed = asyncio.Condition()

    @property
    def ready(self) -> bool:
        """Whether a request for one of the models would succeed now."""
        return any(map(self.serves, self._models))

    def serves(self, name: str) -> bool:
        """Whether a request for this model would succeed now."""
        model = self._models.get(name)
        return self._connected and model is not None and model.ready

    def known(self, name: str) -> ModelView | None:
        """The router's last description of the model, kept while the router is away; None before the first."""
        return self._models.get(name)

    def adapted(self, base: str) -> list[str]:
        """The names of a model with its adapters."""
        return [name for name, model in self._models.items() if model.base == base and model.adapter]

    async def model(self, name: str, patience_s: float) -> ModelView:
        """The model, for a request. Raises Unavailable when no worker serves it within `patience_s`."""
        try:
            async with asyncio.timeout(patience_s), self.changed:
                await self.changed.wait_for(lambda: name in self._models)
        except TimeoutError:
            pass
        if name not in self._models:
            raise Unavailable("the model is not being served yet; try again later", code="not_ready", retry_after=1)
        return self._models[name]

    async def until(self, ready: bool) -> None:
        """Returns when `self.ready` equals `ready`."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.ready is ready)

    async def hopeful(self, name: str, pause_s: float) -> None:
        """For a request that found no workers of the model: returns when it may find some, after `pause_s` at the
        earliest.

        The pause is for a view that is ready although the caller has seen a worker fail: the router may not have.
        """
        await asyncio.sleep(pause_s)
        async with self.changed:
            await self.changed.wait_for(lambda: self.serves(name))

    @contextmanager
    def heard(self, member: str, end: Callable[[], object]) -> Iterator[None]:
        """Within the block, calls `end` when the router has not heard from `member` for too long."""
        self._calls[member][end] = None
        if member in self._silent:
            end()
        try:
            yield
        finally:
            self._calls[member].pop(end, None)
            if not self._calls[member]:
                del self._calls[member]

    def sites(self) -> list[str]:
        """The names of all sites, this gateway's first."""
        return [*self._sites]

    def serves_at(self, site: str, name: str) -> bool:
        """Whether workers of a site could take a request for this model now, and give the tokens that those here would
        give: they have the same weights, and compute with the same numbers."""
        view, known = self._sites[site].view, self._models.get(name)
        found = [] if view is None else [model for model in view.models if model.name == name and model.ready]
        if known is None:
            return False
        return any(spec_from_message(model.spec) == known.spec and model.adapter == known.adapter for model in found)

    def routers(self, site: str) -> list[str]:
        """The addresses of a site's routers, in the order in which to ask them for a plan."""
        return self._sites[site].order()

    async def gave_up(self, site: str, router: str) -> None:
        """A router gave no plan where another of its site may: this gateway plans with the next."""
        self._sites[site].failed(router)
        await self._believe()

    async def follow(self, channels: Channels) -> None:
        """Keeps watching; reconnects, ever more patiently, when a router goes away."""

        async def watch(choice: RouterChoice[router_pb2.MeshView], router: str, connection: Connection) -> None:
            request = router_pb2.WatchRequest(watcher=await asyncio.shield(self._own))
            call = router_pb2_grpc.RouterStub(channels.to(router, "router")).Watch(request)
            try:
                async for view in call:
                    connection.established = True
                    choice.heard(router, view, useful=self._useful(view))
                    await self._believe()
            finally:
                call.cancel()
                choice.lost(router)
                await self._believe()

        watches = (
            stay(partial(watch, choice, router), peer="router", log=self._log.bind(router=router), pauses=_PAUSES)
            for choice in self._sites.values()
            for router in choice.order()
        )
        await first_of(*watches)

    async def _believe(self) -> None:
        """Takes over what the chosen router of the first site says that has workers; else of the first that answers.
        Who is silent is said by those of all sites."""
        views = [view for choice in self._sites.values() if (view := choice.view) is not None]
        if views:
            self._hear(frozenset(member for view in views for member in view.silent))
            await self._update(next(filter(self._useful, views), views[0]))
        else:
            await self._set(False, self._models)

    def _useful(self, view: router_pb2.MeshView) -> bool:
        """Whether a request could be placed by it."""
        return any(found.ready and found.name in self._tokenizers for found in view.models)

    def _served(self, found: router_pb2.ServedModel) -> bool:
        """Whether requests for it come here: for a model of this gateway, or one of those with an adapter."""
        return found.name in self._tokenizers or (bool(found.adapter) and found.base in self._tokenizers)

    async def _update(self, view: router_pb2.MeshView) -> None:
        models = {found.name: self._described(found) for found in view.models if self._served(found)}
        missing = frozenset(self._tokenizers) - models.keys()
        if missing and missing != self._missing and view.models:
            self._log.warning("no workers of a model", wanted=sorted(missing), served=[m.name for m in view.models])
        self._missing = missing
        await self._set(True, {name: model for name, model in models.items() if model is not None})

    def _described(self, found: router_pb2.ServedModel) -> ModelView | None:
        """None: the workers' tokens are not this gateway's."""
        spec = spec_from_message(found.spec)
        model = ModelView(spec, found.max_model_len, found.ready, found.adapter, found.base)
        here, there = self._tokenizers[found.base if found.adapter else found.name], model.spec.tokenizer
        if here == there:
            return model
        self._log.error("the workers' model has another tokenizer", model=found.name, here=here, there=there)
        return None

    def _hear(self, silent: frozenset[str]) -> None:
        """Ends the calls to members that have fallen silent: they may hang for as long as TCP lets them."""
        for member in sorted(silent - self._silent):
            if calls := list(self._calls.get(member, ())):
                self._log.warning("worker is silent, ending calls to it", member=member, calls=len(calls))
            for end in calls:
                end()
        self._silent = silent

    async def _set(self, connected: bool, models: Mapping[str, ModelView]) -> None:
        async with self.changed:
            self._connected, self._models = connected, models
            self.changed.notify_all()


@asynccontextmanager
async def open_view(
    channels: Channels,
    sites: Mapping[str, Sequence[str]],
    *,
    tokenizers: Mapping[str, str],
    own: asyncio.Future[router_pb2.MeshWatcher],
    failed: Failed,
) -> AsyncIterator[RouterView]:
    """A view that follows the routers of all sites for the length of the block, as soon as they can be told where this
    gateway is.
    `failed` counts defects, which restart it."""
    view = RouterView(tokenizers, sites, own)
    async with beside(lambda: view.follow(channels), name="router view", on_failure="restart", failed=failed):
        yield view
