"""A defect in a background task: it is counted, and the mesh serves on; or the service that cannot do without the task
ends with that error. Never does a task die in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs
from tests.mesh.support import DRAFTING, ask, drafting, prompt, until

from penstock.engine.request import SamplingParams
from penstock.runtime import tasks
from penstock.testing.mesh import Mesh, MeshSetup, open_mesh

POLICIES = {
    "announcing": "restart",
    "attach": "restart",
    "balance": "restart",
    "block events": "restart",
    "disk": "restart",
    "disk mover": "restart",
    "draft client": "restart",
    "drafting": "restart",
    "event replay": "restart",
    "grammars": "restart",
    "health": "restart",
    "http": "stop",
    "join": "stop",
    "kvstore pages": "restart",
    "ledger": "restart",
    "lend": "restart",
    "line": "restart",
    "member reader": "log",
    "membership": "restart",
    "mesh view": "restart",
    "publish": "restart",
    "rescue": "restart",
    "router view": "restart",
    "tidy": "restart",
    "touch": "restart",
}
"""Every background task of a mesh that is idle, and what its failure does. Whoever adds a task adds it here. Tasks of
settings that this mesh does without, keys and certificates, are not here."""

ENDS = [name for name, policy in POLICIES.items() if policy == "stop"]

# A reading of gRPC that is made to fail completes once more, later.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


class Injected(Exception):
    """A defect of the task's own."""


@asynccontextmanager
async def whole_mesh(model: Path, disk: Path) -> AsyncIterator[Mesh]:
    """With most of what starts tasks: drafts, a disk tier, published events, a balancer."""
    store = {
        "nvme_dir": disk,
        "nvme_bytes": 64 << 20,
        "events_address": "tcp://127.0.0.1:0",
        "events_replay_address": "tcp://127.0.0.1:0",
    }
    setup = MeshSetup(model=model, draft=str(model), store=store, router={"balance": True}, engine=DRAFTING)
    async with open_mesh(setup) as mesh:
        yield mesh


@pytest.fixture(scope="module")
async def others() -> set[asyncio.Task[Any]]:
    """Tasks that run already: those of services that tests elsewhere share, with the same names."""
    return asyncio.all_tasks()


@pytest.fixture(scope="module")
async def mesh(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, others: set[asyncio.Task[Any]]
) -> AsyncIterator[Mesh]:
    async with whole_mesh(tiny, tmp_path_factory.mktemp("disk")) as opened:
        yield opened


def background(others: set[asyncio.Task[Any]]) -> dict[str, list[asyncio.Task[Any]]]:
    """The tasks that `penstock.runtime.tasks` runs now, by name, without `others`."""
    found: dict[str, list[asyncio.Task[Any]]] = {}
    for task in asyncio.all_tasks() - others:
        coroutine: Any = task.get_coro()
        if getattr(coroutine, "cr_code", None) is tasks._run.__code__:
            found.setdefault(task.get_name(), []).append(task)
    return found


def policy(task: asyncio.Task[Any]) -> str:
    coroutine: Any = task.get_coro()
    return str(coroutine.cr_frame.f_locals["on_failure"])


async def inject(name: str, others: set[asyncio.Task[Any]]) -> None:
    """Lets a task of that name, and none of `others`, fail at the point where it waits."""
    await until(lambda: name in background(others), f"{name} runs")  # another's failure may have begun it again
    chosen = background(others)[name][0]
    while True:
        waits: Any = chosen
        while isinstance(waits, asyncio.Task):
            waits = waits._fut_waiter
        if waits is not None and not waits.done():
            waits.set_exception(Injected())
            return
        await asyncio.sleep(0)


def failures(mesh: Mesh, name: str) -> float:
    """How often tasks of that name have failed, over all services."""
    served = [mesh.gateway, mesh.router, *mesh.kvstores, *mesh.prefill, *mesh.decode, mesh.draft]
    samples = (
        service.metrics.registry.get_sample_value("penstock_task_failures_total", {"task": name})
        for service in served
        if service is not None
    )
    return sum(sample or 0 for sample in samples)


async def test_every_background_task_is_known(
    mesh: Mesh, http: httpx2.AsyncClient, others: set[asyncio.Task[Any]]
) -> None:
    await drafting(http, mesh)
    await until(lambda: background(others).keys() <= POLICIES.keys(), "the mesh is idle")
    assert {name: policy(found[0]) for name, found in sorted(background(others).items())} == POLICIES


async def ready(http: httpx2.AsyncClient, mesh: Mesh) -> None:
    """Returns when the gateway says that a request would succeed."""
    async with asyncio.timeout(20):
        while (await http.get(f"{mesh.url}/readyz")).status_code != 200:
            pass


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ENDS])
async def test_a_task_that_fails_is_counted_and_the_mesh_serves(
    mesh: Mesh, http: httpx2.AsyncClient, others: set[asyncio.Task[Any]], name: str
) -> None:
    await drafting(http, mesh)
    tokens = prompt(f"before {name}", 80)
    before = await ask(http, mesh, tokens, GREEDY)
    counted = failures(mesh, name)
    with capture_logs() as lines:
        await inject(name, others)
        await until(lambda: failures(mesh, name) == counted + 1, f"{name} is counted")
        if POLICIES[name] == "restart":
            await until(lambda: name in background(others), f"{name} runs again")
    assert [line["event"] for line in lines if line.get("task") == name] == ["background task failed"]
    await ready(http, mesh)
    assert (await ask(http, mesh, tokens, GREEDY)).ids == before.ids
    await drafting(http, mesh)


@pytest.mark.parametrize("name", ENDS)
async def test_a_service_ends_with_the_error_of_a_task_that_it_cannot_do_without(
    tiny: Path, http: httpx2.AsyncClient, tmp_path: Path, name: str
) -> None:
    others = asyncio.all_tasks()
    with pytest.raises((Injected, ExceptionGroup)) as caught:
        async with asyncio.timeout(60), whole_mesh(tiny, tmp_path) as opened:
            await drafting(http, opened)
            await inject(name, others)
            await asyncio.Event().wait()
    error: BaseException = caught.value
    while isinstance(error, ExceptionGroup):
        [error] = error.exceptions
    assert isinstance(error, Injected)
