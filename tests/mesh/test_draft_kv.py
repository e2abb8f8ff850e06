"""The draft's KV in a mesh: ready before decode wants drafts, and not lost with the draft service."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from penstock.engine.request import SamplingParams
from penstock.testing.mesh import MeshSetup

from .support import DRAFTING, ask, drafting, held, process, prompt, until

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.9, top_p=0.9, seed=11)
"""Drafts of the model, whether they pay or not, and on a busy machine, too."""


async def test_the_draft_has_computed_a_prompt_before_prefill_has(tiny: Path, meshes, http, oracle) -> None:
    tokens = prompt("early", 300)
    async with meshes(MeshSetup(model=tiny, draft=str(tiny), engine=DRAFTING)) as mesh:
        await drafting(http, mesh)
        told = mesh.draft.metrics.registry.get_sample_value
        before = told("penstock_draft_told_tokens_total", {"source": "computed"})
        with held(mesh.prefill[0].worker.engine):
            asked = http.post(f"{mesh.url}/v1/completions", json={"model": "tiny", "prompt": tokens, "max_tokens": 4})
            running = asyncio.ensure_future(asked)
            await until(
                lambda: told("penstock_draft_told_tokens_total", {"source": "computed"}) == before + 299,
                "the draft has computed all but the last token",
            )
            assert mesh.prefill[0].worker.engine.stats().steps == 0
        assert (await running).status_code == 200


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
async def test_kill_9_of_the_draft_service_between_two_turns(tiny: Path, meshes, http, oracle, sampling) -> None:
    """Real processes. What the first has computed the second fetches, prompt and answer, and drafts with it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics = f"127.0.0.1:{free.getsockname()[1]}"
    first = prompt("turns", 500)
    async with process("kvstore", "--host-bytes", "64MiB", "--draft-bytes", "16MiB", "--host-id", "test") as (store, _):
        settings = ("--model", str(tiny), "--kvstore", store, "--host-id", "test", "--metrics-address", metrics)
        async with process("draft", *settings) as (address, pid):
            options = MeshSetup(model=tiny, draft=f"address:{address}", kvstore=store, engine=DRAFTING)
            async with meshes(options) as mesh:
                await drafting(http, mesh)
                answer = await ask(http, mesh, first, sampling, session="talk")
                assert answer.ids == (await oracle(first, sampling)).ids and answer.accepted > 10
                await _published(http, metrics, (500 + 40) // 16 - 1)
                os.kill(pid, signal.SIGKILL)
                async with process("draft", *settings, "--address", address):
                    await drafting(http, mesh)
                    assert (await _told(http, metrics))["store"] == 0
                    second = [*first, *answer.ids, *prompt("more", 60)]
                    again = await ask(http, mesh, second, sampling, session="talk")
                    assert again.ids == (await oracle(second, sampling)).ids and again.accepted > 10
                    told = await _told(http, metrics)
                    assert told["store"] >= (500 + 40) // 16 * 16 - 16
                    assert told["computed"] < 200


async def _read(http: httpx2.AsyncClient, metrics: str, name: str) -> dict[str, float]:
    text = (await http.get(f"http://{metrics}/metrics")).text
    return {label: float(value) for label, value in re.findall(rf'^{name}(?:{{\w+="(\w+)"}})? (\S+)$', text, re.M)}


async def _told(http: httpx2.AsyncClient, metrics: str) -> dict[str, float]:
    return await _read(http, metrics, "penstock_draft_told_tokens_total")


async def _published(http: httpx2.AsyncClient, metrics: str, blocks: int) -> None:
    async with asyncio.timeout(10):
        while (await _read(http, metrics, "penstock_blocks_published_total"))[""] < blocks:
            pass
