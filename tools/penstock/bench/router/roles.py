"""Workers that do both beside workers that prefill or decode, on the same cores: a real mesh under mixed load.

Streams run while long prompts come, one after the other. One mesh has two workers that do both, the other one that
prefills and one that decodes; each worker has cores of its own, as far as there are enough.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

import numpy as np

from penstock.bench.e2e.loads import LoadStage, MixedLoad
from penstock.bench.e2e.model import served
from penstock.bench.e2e.running import Server
from penstock.bench.e2e.subjects import Sources
from penstock.bench.engine.process import Failed
from penstock.bench.engine.shapes import SMALL
from penstock.bench.engine.subjects import Places
from penstock.bench.harness import Figure, Measure, figure, interleave, missing
from penstock.load.asking import AskFailed

_TOGETHER, _APART = "aggregated", "disaggregated"
_PERCENTS = (50.0, 90.0, 99.0)
_GOAL = 3.0
"""What is often said of disaggregation."""
RoleSample = Mapping[str, float]
"""Seconds, by `itl_p50` to `ttft_p99`."""


async def roles_figures(quick: bool) -> list[Figure]:
    """`itl_p90_aggregated_over_disaggregated`, and ITL of the streams and TTFT of the long prompts of both."""
    places = Places.default()
    sources = Sources(SMALL, await asyncio.to_thread(served, SMALL, places.models), places)
    load = MixedLoad(streams=4, output=64 if quick else 256)
    id = "itl_p90_aggregated_over_disaggregated"
    try:
        async with (
            sources.open("mesh_aggregated", "--decode", "2") as together,
            sources.open("mesh_disaggregated") as apart,
        ):
            subjects = {_TOGETHER: _measured(together, load), _APART: _measured(apart, load)}
            found = await interleave(subjects, 1 if quick else 3, warm_up=False)
    except (Failed, AskFailed) as error:
        return [missing(id, "ratio", str(error), _GOAL)]
    pairs = zip(found[_TOGETHER], found[_APART], strict=True)
    lead = figure(id, [one["itl_p90"] / other["itl_p90"] for one, other in pairs], "ratio", "same cores", _GOAL)
    return [
        lead,
        *(
            figure(f"{what}_{name}", [sample[what] for sample in samples], "s", "for scale")
            for name, samples in found.items()
            for what in samples[0]
        ),
    ]


def _measured(server: Server, load: MixedLoad) -> Measure[RoleSample]:
    async def sample(round: int) -> RoleSample:
        parts = await load.run(LoadStage(server.target, SMALL.vocab), f"mixed/{round}")
        gaps = [gap for record in parts["streams"] for gap in record.token_gaps]
        firsts = [record.ttft for record in parts["long"] if record.ttft is not None]
        found = {f"itl_p{percent:.0f}": float(np.percentile(gaps, percent)) for percent in _PERCENTS}
        found |= {f"ttft_p{percent:.0f}": float(np.percentile(firsts, percent)) for percent in _PERCENTS}
        print(f"{server.spec.command[-4:]}: {found}", file=sys.stderr, flush=True)
        return found

    return sample
