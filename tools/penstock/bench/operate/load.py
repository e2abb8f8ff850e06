"""How late `penstock load` sends on the machine that it shares with the mesh which it loads."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.bench.e2e.running import free_port, serving
from penstock.bench.e2e.servers import MESH, MeshForm, up
from penstock.bench.harness import Figure, figure
from penstock.load.metrics import metrics_of_lateness
from penstock.load.options import LoadOptions
from penstock.load.processes import ClientProcesses
from penstock.load.records import LoadRecord
from penstock.load.running import run
from penstock.models import embedded

_MODEL = "penstock-mini"
_MIX = "turns=4,system=600,tools=400,new=120,output=48,think=1,spread=0.4"
_GOAL = 0.01
"""A client that is later than by so much of the median latency is a part of what is measured."""


async def load_figures(quick: bool) -> list[Figure]:
    """Agents' sessions that begin at random, before the mesh as it comes, from one process of the client."""
    sessions, rounds = (6, 1) if quick else (40, 3)
    port = free_port()
    async with serving(up(MESH, embedded(_MODEL), port, MeshForm()), port) as server:
        options = LoadOptions(
            url=f"http://127.0.0.1:{server.port}",
            mix=(_MIX,),
            limit=sessions,
            rate=1.0,
            rounds=rounds + 1,
            seed="operate",
        )
        done = await run(options, None, ClientProcesses())
    return lateness_figures([[one for one in done.records if one.round == number + 1] for number in range(rounds)])


def lateness_figures(rounds: Sequence[Sequence[LoadRecord]]) -> list[Figure]:
    """p99 of the schedule delay of each round, and what part of the median latency that is. Raises RuntimeError for a
    round without an answer."""
    found = [late for records in rounds if (late := metrics_of_lateness(records)) is not None]
    if len(found) < len(rounds):
        raise RuntimeError("a round of the load was not answered at all")
    against = "the median latency of the same requests"
    parts = [delay_s / latency_s for delay_s, latency_s in found]
    return [
        figure("load_schedule_delay_p99_ms", [1e3 * delay_s for delay_s, _ in found], "ms", "when requests were due"),
        figure("load_schedule_delay_vs_latency", parts, "ratio", against, _GOAL, lower_is_better=True),
        figure("load_latency_p50_ms", [1e3 * latency_s for _, latency_s in found], "ms", "for scale"),
    ]
