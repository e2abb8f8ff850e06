"""`penstock bench trust --part faults`: every service gets every fault while requests are in every phase."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from penstock.bench.harness import Figure, figure
from penstock.bench.soak.asking import SoakClient
from penstock.bench.soak.faults import kind_of
from penstock.bench.soak.leaks import settled
from penstock.bench.soak.mesh import blocks_of, soak_mesh
from penstock.bench.soak.options import SoakOptions
from penstock.bench.trust.faults.acts import ACTS, Act, acts_of
from penstock.bench.trust.faults.scene import FaultCell, FaultScene, Strike
from penstock.cli.mesh import MeshOptions
from penstock.testing.wires import MeshWires

OPTIONS = SoakOptions(clients=16, prefill=2, decode=2, store_bytes=MeshOptions.kv_host_bytes)
_QUICK: Sequence[Act] = ("kill", "cut")
_MOST_PAUSE_S = 3


@asynccontextmanager
async def fault_scene(size: float = 1.0) -> AsyncIterator[FaultScene]:
    """A mesh to be struck, for the length of the block; `size` as that of the scene."""
    with TemporaryDirectory(prefix="penstock-faults-") as place:
        directory = Path(place)
        ways = directory / "ways"
        ways.mkdir(mode=0o700)
        async with MeshWires(ways) as wires, soak_mesh(OPTIONS, directory, wires) as mesh:
            yield FaultScene(mesh, wires, SoakClient(mesh.gateways, OPTIONS), blocks_of(directory), size)


async def fault_figures(quick: bool) -> Sequence[Figure]:
    """Runs the matrix; `quick`: two of the faults. What went wrong is told on standard error."""
    console = Console(stderr=True)
    strikes: list[Strike] = []
    async with fault_scene() as scene:
        cells = [cell for cell in matrix(scene.mesh.services) if not quick or cell[1] in _QUICK]
        with Progress(console=console, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("start", total=len(cells))
            for service, act, idle in cells:
                bar.update(task, description=f"{act} {service}{', idle' if idle else ''}")
                strike = await scene.strike(service, act, idle=idle)
                for line in told(strike):
                    console.print(f"[red]{escape(line)}[/]", soft_wrap=True)
                strikes.append(strike)
                bar.advance(task)
        _, leaks = await settled(scene.mesh, None, OPTIONS.settle_s)
        for line in leaks:
            console.print(f"[red]{escape(line)}[/]", soft_wrap=True)
    return figures(strikes, len(leaks))


def matrix(services: Sequence[str]) -> Iterator[tuple[str, Act, bool]]:
    """Which service gets which fault, and whether the mesh is idle then: one service of each kind."""
    kinds = {kind_of(service): service for service in sorted(services, reverse=True)}
    for kind, service in sorted(kinds.items()):
        for act in acts_of(kind):
            for idle in (True, False):
                yield service, act, idle


def told(strike: Strike) -> list[str]:
    """What went wrong, for people."""
    found = [
        f"{cell.act} {cell.service}, {cell.phase}: {cell.lost or f'{cell.wrong} tokens are wrong'}"
        for cell in strike.cells
        if cell.failed
    ]
    first, late = strike.cells[0], f"this process was late by {strike.late_s:.2f} s at most"
    found += [
        f"{cell.act} {cell.service}, {cell.phase}: a pause of {cell.pause_s:.1f} s; {late}"
        for cell in strike.cells
        if cell.pause_s > _MOST_PAUSE_S
    ]
    if strike.overdue_s > 1:
        what = f"a request outlived its deadline by {strike.overdue_s:.1f} s"
        found.append(f"{first.act} {first.service}: {what}; {late}")
    return found


def figures(strikes: Sequence[Strike], leaks: int) -> list[Figure]:
    """Of all strikes, and the longest pause of each fault."""
    cells = [cell for strike in strikes for cell in strike.cells]
    reached = sum(cell.reached for cell in cells)
    kinds = len({(kind_of(cell.service), cell.act, cell.phase) for cell in cells})
    latest = max(strikes, key=lambda one: one.overdue_s)
    about = f"{kinds} of service, fault and phase; {reached} of {len(cells)} requests were in their phase"
    found = [
        figure("fault_cells", [kinds], "", about),
        figure("fault_streams_lost", [sum(bool(cell.lost) for cell in cells)], "", "", 0, lower_is_better=True),
        figure("fault_tokens_wrong", [sum(cell.wrong for cell in cells)], "", "", 0, lower_is_better=True),
        figure("fault_leaks", [leaks], "", "at rest afterwards", 0, lower_is_better=True),
        figure("fault_overdue_s", [latest.overdue_s], "s", f"worst: {_of(latest.cells[0])}", 1, lower_is_better=True),
        figure("fault_back_s", [max(one.back_s for one in strikes)], "s", "worst", 5, lower_is_better=True),
        figure(
            "fault_late_s", [max(one.late_s for one in strikes)], "s", "for scale: how late the clients' process was"
        ),
    ]
    for act in ACTS:
        worst = max((cell for cell in cells if cell.act == act), key=lambda cell: cell.pause_s, default=None)
        if worst is not None:
            found.append(
                figure(
                    pause_id(act),
                    [worst.pause_s],
                    "s",
                    f"worst: {_of(worst)}, {worst.phase}",
                    _MOST_PAUSE_S,
                    lower_is_better=True,
                )
            )
    return found


def _of(cell: FaultCell) -> str:
    return f"{cell.act} {kind_of(cell.service)}"


def pause_id(act: Act) -> str:
    """The figure of the longest pause of a fault."""
    return f"fault_pause_s_{act.replace(' ', '_')}"
