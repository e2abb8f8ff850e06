"""`penstock bench e2e`: the mesh as a user meets it beside llama-server, vLLM's server and OpenVINO.

All serve the same weights to the same client, which sends prompts as token ids and takes the time of every token. In
each round every server gets the same requests, one server at a time. Prompts are new in every round, so what is
cached was computed in that round.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.bench.e2e import figures, incidents
from penstock.bench.e2e.ablations import ABLATIONS, ablation_figures
from penstock.bench.e2e.cells import NAMES, LoadCell, cells
from penstock.bench.e2e.model import served
from penstock.bench.e2e.report import E2eReport
from penstock.bench.e2e.servers import MESH, PEERS, SERVERS, THREADS, USUAL, sittings
from penstock.bench.e2e.subjects import ServerRow, ServerSample, Sources, Subjects, opened
from penstock.bench.engine import own
from penstock.bench.engine.limits import Memory
from penstock.bench.engine.shapes import BIG, SMALL, LlamaShape, weight_bytes
from penstock.bench.engine.subjects import Places
from penstock.bench.harness import Figure, Measure, interleave
from penstock.runtime.config import ConfigError

STEP8K = "step8k"
CELLS = (*NAMES, *incidents.INCIDENTS, STEP8K)
_SHAPES = {shape.name: shape for shape in (SMALL, BIG)}


@dataclass(frozen=True, slots=True, kw_only=True)
class E2eOptions:
    """What is measured."""

    shape: str = SMALL.name
    quick: bool = False
    cells: Sequence[str] = ()
    """Empty: all."""
    servers: Sequence[str] = ()
    """Empty: the usual ones."""
    rounds: int = 3
    ablations: bool = False
    """The mesh with and without its parts, and nothing else; then `cells` names parts."""
    peers: Path | None = None
    """Where the peers' environments are; None: at the default place."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a name that there is not."""
        parts = tuple(ablation.name for ablation in ABLATIONS)
        for setting, known in (("cells", parts if self.ablations else CELLS), ("servers", SERVERS)):
            for name in getattr(self, setting):
                if name not in known:
                    raise ConfigError(setting, name, f"must be one of {', '.join(known)}")


async def measure(wanted: E2eOptions) -> E2eReport:
    """Runs the bench."""
    gc.freeze()  # what is there now stays: no collection has to look at it while times are taken
    if wanted.ablations:
        return E2eReport("e2e", await ablation_figures(wanted.quick, wanted.rounds, wanted.cells))
    shape = _SHAPES[wanted.shape]
    places = Places(wanted.peers.absolute()) if wanted.peers else Places.default()
    sources = Sources(shape, await asyncio.to_thread(served, shape, places.models), places)
    names = wanted.servers or USUAL
    rows: list[ServerRow] = []
    load = cells(wanted.quick, wanted.cells)
    for sitting in sittings(names, shape, weight_bytes(sources.model)) if load else ():
        async with opened(sitting, sources) as subjects:
            for cell in load:
                rows += await _cell(cell, subjects, sitting, shape, wanted.rounds)
    for incident in incidents.INCIDENTS:
        if incident in wanted.cells or not (wanted.cells or wanted.quick):
            rows += await incidents.measure(incident, concerned(incident, wanted.servers), sources)
    suffix = "" if shape is SMALL else f"_{shape.name}"
    found = [*figures.compared(rows, suffix), *figures.shared_prefix(rows, suffix)]
    if STEP8K in wanted.cells or (shape is BIG and not wanted.cells):
        found.append(await _step8k(places, wanted.quick))
    return E2eReport("e2e", [*found, *figures.scales(rows, shape.name)], rows)


def concerned(incident: str, named: Sequence[str]) -> list[str]:
    """The servers that an incident happens to: those that are named, else the mesh as it comes and its peers, of which
    nobody asks what a common prefix takes."""
    if named:
        return [*named]
    return [MESH, *(() if incident == incidents.SHARED else PEERS)]


async def _step8k(places: Places, quick: bool) -> Figure:
    """Of the bare engine, as in `penstock bench engine`; the 1B shape always."""
    return replace(await own.long_context(places, Memory(THREADS), quick), id="step8k_vs_read")


async def _cell(
    cell: LoadCell, subjects: Subjects, names: Sequence[str], shape: LlamaShape, rounds: int
) -> list[ServerRow]:
    def subject(name: str) -> Measure[ServerSample]:
        async def sample(number: int) -> ServerSample:
            return await subjects.sample(name, cell, shape, number)

        return sample

    found = await interleave({name: subject(name) for name in names}, rounds, warm_up=False)
    rows = [ServerRow(cell.name, name, found[name], found.get(MESH, ())) for name in names]
    for row in rows:
        print(f"{cell.name} {row.server}: {row.told}", file=sys.stderr, flush=True)
    return rows
