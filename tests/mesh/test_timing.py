"""Where the gateway says that time went agrees with the clock of a client, to the first token and to the last."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace

import pytest

from penstock.engine.request import SamplingParams
from penstock.gateway.completing.timing import BEFORE_FIRST, PARTS
from penstock.testing.checkpoints import write_checkpoint
from penstock.testing.mesh import MeshSetup

from .conftest import TINY
from .support import body_of, prompt

REQUESTS = 9
WITHIN = 0.05
PLAIN = SamplingParams(
    max_tokens=48, temperature=0.0, ignore_eos=True, logit_bias=dict.fromkeys(range(256, 260), -100.0)
)


@pytest.fixture(scope="module", params=[False, True], ids=["disaggregated", "aggregated"])
async def mesh(request, tmp_path_factory, meshes):
    """Its model is wide enough that a prompt takes much longer than a client's own work."""
    wide = replace(TINY, hidden_size=256, intermediate_size=1024, layers=6)
    directory = write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", wide)
    async with meshes(MeshSetup(model=directory, aggregated=request.param)) as mesh:
        yield mesh


async def timed(http, mesh, name):
    """Seconds to the first token and to the end: by the client's clock, and by the sums of the gateway's parts."""
    body = body_of(prompt(name, 1900), PLAIN) | {"stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(body).encode()
    first = usage = None
    begun = time.perf_counter()
    async with http.stream("POST", f"{mesh.url}/v1/completions", content=content) as answer:
        async for line in answer.aiter_lines():
            first = first or time.perf_counter() - begun
            if line.startswith("data: {"):
                usage = json.loads(line[6:])["usage"] or usage
    total = time.perf_counter() - begun
    found = usage["penstock"]["times"]
    return first, sum(found[part] for part in BEFORE_FIRST), total, sum(found[part] for part in PARTS), found


async def test_the_parts_add_up_to_the_clients_clock(mesh, http):
    """Medians over requests, one after the other: a pause of the machine between client and gateway is no fault."""
    rounds = [await timed(http, mesh, f"timing/{mesh.url}/{number}") for number in range(REQUESTS)]
    for clock, parts in ((0, 1), (2, 3)):
        ratios = [one[parts] / one[clock] for one in rounds]
        assert statistics.median(ratios) == pytest.approx(1, abs=WITHIN), ratios
    for *_, found in rounds:
        assert found["prefill"] > 0 and found["decode"] > 0
        assert (found["handoff"] > 0) is bool(mesh.prefill)
        assert found["call"] < found["total"] / 2, "most of the time is told by its worker"
