"""A whole mesh in one process: real services, real sockets on free ports, no supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from penstock.decode.config import DecodeConfig
from penstock.decode.service import open_decode
from penstock.draft.config import DraftConfig
from penstock.draft.service import ServedDraft, open_draft
from penstock.engine.config import EngineConfig
from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import Gateway, open_gateway
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.prefill.config import PrefillConfig
from penstock.prefill.service import open_prefill
from penstock.router.config import RouterConfig
from penstock.router.service import Router, open_router
from penstock.rpc.channels import open_channels
from penstock.rpc.identity import MemberIdentity, MemberRole
from penstock.stage.config import StageConfig
from penstock.stage.service import OpenStage, open_stage
from penstock.v1 import router_pb2, router_pb2_grpc
from penstock.worker.opening import ServedWorker
from penstock.worker.worker import Worker

_SERVER_KEY = "5e" * 32
_ROUTER: dict[str, Any] = {"local_prefill_tokens": 64}
"""Prompts of tiny models are shorter than a hand-off, which most tests are to see all the same."""
_PATIENT_S = 30.0
"""Seconds that workers wait for a store in their own process, however long the machine stands still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSetup:
    """Describes the mesh to open."""

    model: Path
    draft: str = "none"
    """A model directory, `none`, `address:HOST:PORT` of a draft service of the test's own, or `head:DIRECTORY` for one
    with a draft head for the model."""
    prefill: int = 1
    decode: int = 1
    aggregated: bool = False
    """Workers that hold both roles; `prefill` counts nothing."""
    hosts: int = 1
    """Hosts with a store each, as far as the mesh can tell; worker n of each kind is on host n modulo this."""
    kv_host_bytes: int = 64 << 20
    kvstore: bool | str = True
    """False: none. An address: a store of the test's own."""
    model_name: str = "tiny"
    members: Callable[[MemberRole], Path] | None = None
    """Gives the directory of a role's certificate, in a mesh whose members show them."""
    seal: bool = False
    """Blocks are sealed, under a server key of the test's."""
    routers: tuple[str, ...] = ()
    """Addresses of routers of the test's own, which gateways prefer to the mesh's."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Further fields of the settings of the workers' engines."""
    prefill_engine: dict[str, Any] = field(default_factory=dict)
    """Those of prefill workers, where they differ."""
    stages_away: bool = False
    """Whether each stage of a worker's model but the first is computed by a service of its own, as on another host."""
    worker: dict[str, Any] = field(default_factory=dict)
    """Further fields of the workers' settings."""
    store: dict[str, Any] = field(default_factory=dict)
    """Further fields of the store's settings, as those below."""
    router: dict[str, Any] = field(default_factory=dict)
    gateway: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Mesh:
    """A running mesh."""

    gateway: Gateway
    router: Router
    kvstores: list[KvStore]
    """One per host; none when the mesh was to have none."""
    prefill: list[ServedWorker]
    decode: list[ServedWorker]
    draft: ServedDraft | None
    """The mesh's own draft service, where it has one."""
    stages: list[OpenStage]
    """Hosts of stages, in the order of the workers, those that prefill first."""

    @property
    def kvstore(self) -> KvStore:
        """The first host's store, of a mesh that has its own."""
        return self.kvstores[0]

    @property
    def url(self) -> str:
        """Base URL of the HTTP API."""
        return f"http://{self.gateway.address}"

    @property
    def workers(self) -> list[Worker]:
        """Every worker."""
        return [served.worker for served in (*self.prefill, *self.decode)]


@asynccontextmanager
async def open_mesh(options: MeshSetup) -> AsyncIterator[Mesh]:
    """Opens every service, waits until a request would succeed, and closes them in the opposite order."""
    async with AsyncExitStack() as stack:

        def shows(role: MemberRole) -> dict[str, Any]:
            return {} if options.members is None else {"member_tls": options.members(role)}

        router_config = RouterConfig(**_ROUTER | shows("router") | options.router)
        router = await stack.enter_async_context(open_router(router_config))
        routers = (*options.routers, router.address)
        hosts = ["test", *(f"test-{number}" for number in range(1, options.hosts))]
        stores = []
        for host in hosts if options.kvstore is True else ():
            settings: dict[str, Any] = {"host_bytes": options.kv_host_bytes, "router": routers, "host_id": host}
            settings |= {"draft_bytes": 16 << 20 if options.draft != "none" else 0, **shows("store"), **options.store}
            stores.append(await stack.enter_async_context(open_kvstore(KvStoreConfig(**settings))))
        kvstore = {"kvstore": stores[0].address, "host_id": hosts[0]} if stores else {}
        drafting = {**kvstore, **shows("draft"), "seal": options.seal, "router": routers}
        draft, draft_address = await _open_draft(stack, options, drafting)

        def worker(number: int) -> dict[str, Any]:
            host = number % len(hosts)
            return {
                "engine": EngineConfig(options.model, **{"kv_pool_tokens": 8192, "baton": "none", **options.engine}),
                "model_name": options.model_name,
                "router": routers,
                "kvstore": stores[host].address if stores else options.kvstore or "",
                "host_id": hosts[host],
                "seal": options.seal,
                **({"store_timeout_s": _PATIENT_S, "fetch_wait_s": _PATIENT_S} if stores else {}),
                **shows("worker"),
                **options.worker,
            }

        def prefilling(number: int) -> dict[str, Any]:
            found = worker(number)
            found["engine"] = replace(found["engine"], **options.prefill_engine)
            if options.draft.startswith("head:"):
                found["engine"] = replace(found["engine"], draft_head="none")
            return found

        stages: list[OpenStage] = []

        async def staged(settings: dict[str, Any]) -> dict[str, Any]:
            """A worker's settings, with hosts for its stages."""
            if not options.stages_away or settings["engine"].pp == 1:
                return settings
            config = StageConfig(model=options.model, **shows("stage"))
            own = [await stack.enter_async_context(open_stage(config)) for _ in range(settings["engine"].pp - 1)]
            stages.extend(own)
            return {**settings, "stage_hosts": tuple(stage.address for stage in own)}

        prefill = [
            await stack.enter_async_context(open_prefill(PrefillConfig(**await staged(prefilling(number)))))
            for number in range(0 if options.aggregated else options.prefill)
        ]
        role: Literal["decode", "both"] = "both" if options.aggregated else "decode"
        decode = [
            await stack.enter_async_context(
                open_decode(DecodeConfig(role=role, draft=draft_address, **await staged(worker(number))))
            )
            for number in range(options.decode)
        ]
        settings = {"model_dir": options.model, "model_name": options.model_name, "router": routers}
        settings |= {"http_address": "127.0.0.1:0", "server_key": _SERVER_KEY if options.seal else ""}
        settings |= {**shows("gateway"), **options.gateway}
        gateway = await stack.enter_async_context(open_gateway(GatewayConfig(**settings)))
        for address in routers:
            await wait_joined(address, len(prefill), len(decode), **shows("gateway"))
        async with gateway.view.changed, asyncio.timeout(30):
            await gateway.view.changed.wait_for(lambda: gateway.view.ready)
        yield Mesh(
            gateway=gateway,
            router=router,
            kvstores=stores,
            prefill=prefill,
            decode=decode,
            draft=draft,
            stages=stages,
        )


async def wait_joined(router: str, prefill: int, decode: int, member_tls: Path | None = None) -> None:
    """Returns when the router lists that many workers of each kind and says that the model is ready."""
    async with open_channels(MemberIdentity.of(member_tls)) as channels, asyncio.timeout(30):
        stub: Any = router_pb2_grpc.RouterStub(channels.to(router, "router"))
        call = stub.Watch(router_pb2.WatchRequest(), wait_for_ready=True)
        async for view in call:
            for model in view.models:
                if model.ready and model.prefill_workers >= prefill and model.decode_workers >= decode:
                    call.cancel()
                    return


async def _open_draft(
    stack: AsyncExitStack, options: MeshSetup, settings: dict[str, Any]
) -> tuple[ServedDraft | None, str]:
    draft = options.draft
    if draft == "none":
        return None, "none"
    if draft.startswith("address:"):
        return None, draft.removeprefix("address:")
    if draft.startswith("head:"):
        draft, settings = str(options.model), {"head": draft.removeprefix("head:")}
    served = await stack.enter_async_context(open_draft(DraftConfig(model=draft, **settings)))
    return served, served.address
