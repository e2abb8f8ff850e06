"""Local workers: a real process that joins a real router, and ends with its planner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.cli.mesh import MeshOptions
from penstock.cli.scale.actuators.base import ActuatorFailed, WorkerPlace
from penstock.cli.scale.actuators.local import LocalActuator, LocalMesh, StorePlace, local_actuator
from penstock.cli.scale.state import WorkRole
from penstock.engine.config import EngineSettings
from penstock.router.config import RouterConfig
from penstock.router.service import Router, open_router
from penstock.runtime.addresses import HostPort
from penstock.testing.checkpoints import TinyModel, write_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", TinyModel(vocab_size=260))


class Opened:
    """An actuator, its router, and who was lost."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.lost: list[WorkRole] = []

    @asynccontextmanager
    async def actuator(self, model: str, engine: EngineSettings) -> AsyncIterator[LocalActuator]:
        async def nowhere() -> StorePlace:
            return StorePlace()

        mesh = LocalMesh(
            options=MeshOptions(models=(model,), engine=engine),
            routers=(HostPort(self.router.address),),
            store=nowhere,
            lost=self.lost.append,
            failed=lambda name: None,
            most=1,
        )
        async with local_actuator(mesh) as actuator:
            yield actuator

    def workers(self) -> dict[str, str]:
        """Roles by address."""
        registry = self.router.planner.registry
        return {seat.member.address: seat.member.role.value for seat in registry if seat.member.role is not None}


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    async with open_router(RouterConfig()) as router:
        yield Opened(router)


async def until(fact: Callable[[], bool]) -> None:
    """Returns when it holds."""
    async with asyncio.timeout(40):
        while not fact():
            await asyncio.sleep(0.01)


async def test_a_worker_joins_and_ends_with_the_planner(opened: Opened, tiny: Path) -> None:
    async with opened.actuator(str(tiny), EngineSettings(kv_pool_tokens=4096, threads=1)) as actuator:
        await actuator.add("prefill")
        await until(lambda: bool(opened.workers()))
        [(address, role)] = opened.workers().items()
        assert role == "prefill"
        with pytest.raises(ActuatorFailed, match="1 local workers are kept already"):
            await actuator.add("prefill")
        assert actuator.removes(WorkerPlace("its id", address))
        await actuator.give_up("prefill", set())
        assert not actuator._kept[address].stop.is_set(), "it has joined, though no router names it now"
        other = WorkerPlace("another", "127.0.0.1:1")
        assert not actuator.removes(other)
        with pytest.raises(ActuatorFailed, match="started by somebody else"):
            await actuator.remove(other)
    await until(lambda: not opened.workers())
    assert opened.lost == []


async def test_a_worker_that_cannot_start_is_told(opened: Opened, tiny: Path, tmp_path: Path) -> None:
    async with opened.actuator(str(tmp_path), EngineSettings()) as actuator:
        with pytest.raises(ActuatorFailed, match="model = "):
            await actuator.add("decode")
    async with opened.actuator(str(tiny), EngineSettings(device="cuda:77")) as actuator:
        await actuator.add("decode")
        await until(lambda: opened.lost == ["decode"] or bool(opened.workers()))
        assert opened.lost == ["decode"]


async def test_a_worker_that_is_given_up_ends_though_it_never_was_ready(opened: Opened, tiny: Path) -> None:
    """And its place is another's then; who has joined is none that is given up."""
    async with opened.actuator(str(tiny), EngineSettings(kv_pool_tokens=4096, threads=1)) as actuator:
        await actuator.add("prefill")
        await actuator.give_up("decode", set())
        with pytest.raises(ActuatorFailed, match="1 local workers are kept already"):
            await actuator.add("prefill")
        await actuator.give_up("prefill", set())
        await until(lambda: not actuator._kept)
        await actuator.add("prefill")
        await until(lambda: bool(opened.workers()))
        [address] = opened.workers()
        await actuator.give_up("prefill", {address})
        assert actuator.removes(WorkerPlace("its id", address))
    assert opened.lost == []
