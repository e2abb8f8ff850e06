"""Prefill and decode on the same cores: they take turns, and the tokens are the same."""

from __future__ import annotations

import asyncio

from penstock.engine.request import SamplingParams
from penstock.runtime.cores import available_cores
from penstock.runtime.metrics import WorkerMetrics
from penstock.testing.mesh import MeshSetup

from .support import ask, prompt

SAMPLING = SamplingParams(
    max_tokens=60, temperature=0.0, ignore_eos=True, logit_bias=dict.fromkeys(range(256, 260), -100.0)
)


async def test_streams_and_prompts_take_turns_on_shared_cores(tiny, oracle, meshes, http, tmp_path):
    prompts = [prompt(f"turns/{number}", 400 + 50 * number) for number in range(12)]
    expected = [(await oracle(each, SAMPLING)).ids for each in prompts]
    settings = {"baton": str(tmp_path / "turns"), "threads": available_cores(), "itl_target_ms": 5}
    async with meshes(MeshSetup(model=tiny, engine=settings)) as mesh:
        answers = await asyncio.gather(*(ask(http, mesh, each, SAMPLING) for each in prompts))
        assert [answer.ids for answer in answers] == expected
        for served in (*mesh.prefill, *mesh.decode):
            turns = served.worker.engine.stats().turns
            assert turns.turns > 0
            assert turns.waited_s > 0
            metrics = served.metrics.registry
            assert metrics.get_sample_value(f"{WorkerMetrics.TURNS}_total") == turns.turns
            assert metrics.get_sample_value(f"{WorkerMetrics.TURN_WAIT_S}_total") == turns.waited_s
            assert metrics.get_sample_value(f"{WorkerMetrics.TURNS_GIVEN_UP}_total") == turns.given_up
