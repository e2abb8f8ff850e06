"""`penstock bench failover`: the pause that clients see when a service dies in the middle of their streams."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import Progress

from penstock.bench.failover.deaths import Aftermath, death, undisturbed
from penstock.bench.failover.kinds import ALONE, KINDS, SERVICES
from penstock.bench.harness import BenchReport, Figure, figure
from penstock.cli.mesh import MeshOptions
from penstock.testing.mortal import mortal_mesh

_GOALS = {"kill": 1.0, "stop": 3.0}
_PATIENCE_S = 120.0

Deaths = Mapping[tuple[str, str], Sequence[Aftermath]]
"""By kind and service."""


async def measure(quick: bool) -> BenchReport:
    """Runs the bench."""
    rounds = 1 if quick else 2
    found: defaultdict[tuple[str, str], list[Aftermath]] = defaultdict(list)
    calm: list[float] = []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("start", total=rounds * (len(KINDS) * len(SERVICES) + 1))
        plans = [(2, [(kind, service) for kind in KINDS for service in SERVICES]), (1, [("kill", ALONE)])]
        for decode, cells in plans:
            options = MeshOptions(port=0, prefill=1, decode=decode, kv_host_bytes=256 << 20, log_level="info")
            async with (
                mortal_mesh(options) as mesh,
                AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=_PATIENCE_S) as client,
            ):
                for round in range(rounds):
                    if decode > 1:
                        calm.append(max(told.gap_s(0.0) for told in await undisturbed(client, f"Nobody {round}")))
                    for kind, service in cells:
                        bar.update(task, description=f"round {round + 1} of {rounds}: {kind} {service}")
                        found[kind, service].append(await death(mesh, client, service, KINDS[kind], round=round))
                        bar.advance(task)
    return BenchReport("failover", figures(found, calm))


def figures(found: Deaths, calm: Sequence[float]) -> list[Figure]:
    """The worst of all deaths beside other workers, then each kind alone; `calm` are the longest waits without one."""
    every = [after for deaths in found.values() for after in deaths]
    lost, wrong, struck = (sum(getattr(one, what) for one in every) for what in ("lost", "wrong", "struck"))
    lead = [
        figure("streams_lost", [lost], "", f"{len(every)} deaths, {struck} streams", 0, lower_is_better=True),
        figure("tokens_wrong", [wrong], "", "unbroken runs", 0, lower_is_better=True),
    ]
    for kind, goal in _GOALS.items():
        gaps = [
            after.gap_s
            for (of, service), deaths in found.items()
            for after in deaths
            if of == kind and service != ALONE
        ]
        lead.append(figure(f"gap_s_max_{kind}", [max(gaps)], "s", "all services", goal, lower_is_better=True))
    scale = [figure("gap_s_nobody", calm, "s", "for scale")]
    scale += [
        figure(f"gap_s_{kind}_{service}", [after.gap_s for after in deaths], "s", "for scale")
        for (kind, service), deaths in found.items()
    ]
    for kind in KINDS:
        parts = [after.parts for after in found.get((kind, "decode"), ()) if after.parts is not None]
        for part in ("noticed", "planned", "resumed") if parts else ():
            scale.append(figure(f"{part}_s_{kind}_decode", [getattr(one, part) for one in parts], "s", "for scale"))
    return lead + scale
