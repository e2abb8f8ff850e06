"""What `penstock bench trust --part faults` does with every service, here with some: a fault while requests are in
every phase. Deaths and stops at every token are in test_deaths."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.bench.soak.leaks import settled
from penstock.bench.trust.faults.acts import Act
from penstock.bench.trust.faults.measure import OPTIONS, fault_scene, told
from penstock.bench.trust.faults.scene import PHASES, FaultScene

STRIKES: list[tuple[str, Act]] = [
    ("decode-0", "cut"),
    ("prefill-0", "cut"),
    ("kvstore", "cut"),
    ("gateway-0", "cut"),
    ("router-0", "slow"),
    ("redis", "stop"),
    ("kvstore", "disk full"),
    ("kvstore", "corrupt"),
    ("decode-0", "no memory"),
    ("prefill-0", "no memory"),
]


@pytest.fixture(scope="module")
async def scene() -> AsyncIterator[FaultScene]:
    async with fault_scene(size=0.3) as scene:
        yield scene


@pytest.fixture(scope="module")
def phases() -> set[str]:
    """In which a fault has found a request."""
    return set()


@pytest.mark.parametrize(("service", "act"), STRIKES)
async def test_a_fault_in_every_phase_costs_time_alone(
    scene: FaultScene, phases: set[str], service: str, act: Act
) -> None:
    strike = await scene.strike(service, act, idle=False)
    phases |= {cell.phase for cell in strike.cells if cell.reached}
    assert not told(strike)


async def test_nothing_is_held_afterwards(scene: FaultScene, phases: set[str]) -> None:
    _, leaks = await settled(scene.mesh, None, OPTIONS.settle_s)
    assert not leaks
    assert phases == {*PHASES} - {"idle"}
