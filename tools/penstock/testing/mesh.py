"""A whole mesh in one process: real services, real sockets on free ports, no supervisor.

The services are imported by name when the mesh opens, so that this library stands below them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOptions:
    """What mesh to open."""

    model: Path
    draft: str = "none"
    """A model directory, `ngram`, `none`, or `address:HOST:PORT` of a draft service of the test's own."""
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
    worker: dict[str, Any] = field(default_factory=dict)
    """Further fields of the workers' settings."""
    store: dict[str, Any] = field(default_factory=dict)
    """Further fields of the store's settings, as those below."""
    router: dict[str, Any] = field(default_factory=dict)
    gateway: dict[str, Any] = field(default_factory=dict)


@dataclass
class Mesh:
    """A running mesh. The services are what their `open_*` functions gave."""

    gateway: Any
    router: Any
    kvstores: list[Any]
    """One per host; none when the mesh was to have none."""
    prefill: list[Any]
    decode: list[Any]
    draft: Any

    @property
    def kvstore(self) -> Any:
        """The first host's store, or None."""
        return self.kvstores[0] if self.kvstores else None

    @property
    def url(self) -> str:
        """Base URL of the HTTP API."""
        return f"http://{self.gateway.address}"

    @property
    def workers(self) -> list[Any]:
        """Every worker."""
        return [served.worker for served in (*self.prefill, *self.decode)]


@asynccontextmanager
async def open_mesh(options: MeshOptions) -> AsyncIterator[Mesh]:
    """Opens every service, waits until a request would succeed, and closes them in the opposite order."""
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(_open("router", **options.router))
        hosts = ["test", *(f"test-{number}" for number in range(1, options.hosts))]
        stores = []
        for host in hosts if options.kvstore is True else ():
            settings = {"host_bytes": options.kv_host_bytes, "router": router.address, "host_id": host, **options.store}
            stores.append(await stack.enter_async_context(_open("kvstore", **settings)))
        draft, draft_address = await _open_draft(stack, options.draft)

        def worker(number: int) -> dict[str, Any]:
            host = number % len(hosts)
            return {
                "model": options.model,
                "model_name": options.model_name,
                "router": router.address,
                "kvstore": stores[host].address if stores else options.kvstore or "",
                "host_id": hosts[host],
                "kv_pool_tokens": 8192,
                **options.worker,
            }

        prefill = [
            await stack.enter_async_context(_open("prefill", **worker(number)))
            for number in range(0 if options.aggregated else options.prefill)
        ]
        role = "both" if options.aggregated else "decode"
        decode = [
            await stack.enter_async_context(_open("decode", role=role, draft=draft_address, **worker(number)))
            for number in range(options.decode)
        ]
        gateway = await stack.enter_async_context(
            _open(
                "gateway",
                http_address="127.0.0.1:0",
                router=router.address,
                model_dir=options.model,
                model_name=options.model_name,
                **options.gateway,
            )
        )
        await wait_joined(router.address, len(prefill), len(decode))
        async with gateway.mesh.changed, asyncio.timeout(30):
            await gateway.mesh.changed.wait_for(lambda: gateway.mesh.ready)
        yield Mesh(gateway, router, stores, prefill, decode, draft)


async def wait_joined(router: str, prefill: int, decode: int) -> None:
    """Returns when the router lists that many workers of each kind and says that the model is ready."""
    watch = import_module("penstock.v1.router_pb2")
    stubs = import_module("penstock.v1.router_pb2_grpc")
    async with grpc.aio.insecure_channel(router) as channel, asyncio.timeout(30):
        call = stubs.RouterStub(channel).Watch(watch.WatchRequest(), wait_for_ready=True)
        async for view in call:
            for model in view.models:
                if model.ready and model.prefill_workers >= prefill and model.decode_workers >= decode:
                    call.cancel()
                    return


async def _open_draft(stack: AsyncExitStack, draft: str) -> tuple[Any, str]:
    if draft == "none":
        return None, "none"
    if draft.startswith("address:"):
        return None, draft.removeprefix("address:")
    served = await stack.enter_async_context(_open("draft", model=draft))
    return served, served.address


def _open(service: str, **settings: Any) -> Any:
    name = {"kvstore": "KvStore"}.get(service, service.capitalize())
    config = getattr(import_module(f"penstock.{service}.config"), f"{name}Config")
    return getattr(import_module(f"penstock.{service}.service"), f"open_{service}")(config(**settings))
