"""Workers whose model is split over several processes, beside others: blocks and tokens are those of one engine."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import SamplingParams
from penstock.testing.checkpoints import TINY_DEEPSEEK, write_checkpoint
from penstock.testing.mesh import MeshSetup

from .conftest import TINY
from .support import BLOCK, GREEDY, SEEDED, ask, prompt, said_alone, settled, until

WHOLE, RANKS, STAGES = {}, {"tp": 2}, {"pp": 2}
APART = {"pages_apart": True}
"""Each process computes in memory of its own, as on CUDA devices."""
CASES = {
    "ranks to whole": (TINY, RANKS, WHOLE),
    "whole to ranks": (TINY, WHOLE, RANKS),
    "latent, ranks to whole": (TINY_DEEPSEEK, RANKS, WHOLE),
    "stages to whole": (TINY, STAGES, WHOLE),
    "whole to stages": (TINY, WHOLE, STAGES),
    "stages to ranks": (TINY, STAGES, RANKS),
    "latent, ranks to both": (TINY_DEEPSEEK, RANKS, RANKS | STAGES),
    "stages on other hosts to ranks": (TINY, STAGES, RANKS),
    "latent, whole to both on other hosts": (TINY_DEEPSEEK, WHOLE, RANKS | STAGES),
    "ranks apart to whole": (TINY, RANKS | APART, WHOLE),
    "whole to ranks apart": (TINY, WHOLE, RANKS | APART),
    "latent, whole to both apart": (TINY_DEEPSEEK, WHOLE, RANKS | STAGES | APART),
    "whole to stages apart on other hosts": (TINY, WHOLE, STAGES | APART),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def model(case, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("ranks") / "model", CASES[case][0])


@pytest.fixture(scope="module")
async def mesh(case, model, meshes):
    _, prefill, decode = CASES[case]
    options = MeshSetup(
        model=model,
        engine={**decode, "threads": 1},
        prefill_engine={"tp": 1, "pp": 1, **prefill},
        worker={"claim_s": 0},
        stages_away="other hosts" in case,
    )
    async with meshes(options) as mesh:
        yield mesh


async def said(model, tokens: list[int], sampling: SamplingParams) -> list[int]:
    """By one engine in one process."""
    async with Engine.open(EngineConfig(model=model, kv_pool_tokens=8192)) as engine:
        return await said_alone(engine, tokens, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_blocks_go_from_a_split_model_to_a_whole_one_and_back(mesh, model, http, sampling, request):
    name = request.node.callspec.id
    first = prompt(name, 150)
    cold = await ask(http, mesh, first, sampling, session=name)
    assert cold.ids == await said(model, first, sampling)
    known = len(first) + len(cold.ids) - 1
    await settled(mesh, [*first, *cold.ids][: known // BLOCK * BLOCK])
    second = [*first, *cold.ids, *prompt("more", 100)]
    warm = await ask(http, mesh, second, sampling, session=name)
    assert warm.ids == await said(model, second, sampling)
    assert warm.cached == known // BLOCK * BLOCK
    assert len({worker.engine.spec for worker in mesh.workers}) == 1


@pytest.mark.parametrize("away", [False, True], ids=["rank", "what speaks for a stage on another host"])
async def test_stream_outlives_a_killed(meshes, http, tiny, away):
    """Its worker leaves, and another one goes on."""
    split = {"pp": 2} if away else {"tp": 2}
    options = MeshSetup(model=tiny, aggregated=True, decode=2, engine={**split, "threads": 1}, stages_away=away)
    async with meshes(options) as mesh:
        await goes_on_elsewhere(mesh, http, tiny, lambda engine: os.kill(engine._runner.ranks.pids[0], signal.SIGKILL))


async def goes_on_elsewhere(mesh, http, model, kill) -> None:
    """A stream whose worker loses what computes with it."""
    long = replace(GREEDY, max_tokens=400)
    text = prompt("outlives", 50)
    running = asyncio.create_task(ask(http, mesh, text, long))
    engines = [worker.engine for worker in mesh.workers]
    await until(lambda: any(engine.stats().generated_tokens > 20 for engine in engines), "a stream")
    [busy] = [served for served in mesh.decode if served.worker.engine.stats().running]
    assert not running.done()
    kill(busy.worker.engine)
    async with asyncio.timeout(30):
        await busy.worker.engine.lost.wait()
        await busy.done.wait()
        assert (await running).ids == await said(model, text, long)
