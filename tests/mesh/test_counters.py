"""The ledger is what the workers counted: over a whole run, with failures in it, by source and to the token."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing

import pytest

from penstock.engine.request import SamplingParams
from penstock.errors import Unavailable
from penstock.testing.mesh import Mesh, MeshSetup

from .support import BLOCK, ask, body_of, prompt, settled

SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SOURCES = ("computed", "worker", "gpu", "host", "nvme", "remote")


@pytest.fixture(scope="module", params=[False, True], ids=["disaggregated", "aggregated"])
async def mesh(request, tiny, meshes):
    async with meshes(MeshSetup(model=tiny, decode=2, aggregated=request.param)) as mesh:
        yield mesh


def counted(mesh: Mesh) -> tuple[Counter[str], int]:
    """What all workers say of prompts, by source, and of generated tokens."""
    given, told = Counter[str](), 0
    for worker in mesh.workers:
        for family in worker.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "penstock_worker_prompt_tokens_total":
                    given[sample.labels["source"]] += int(sample.value)
                elif sample.name == "penstock_worker_generated_tokens_total":
                    told += int(sample.value)
    return +given, told


def again(mesh: Mesh) -> tuple[Counter[str], int]:
    """What the gateway says of tokens that nobody was charged for."""
    value = mesh.gateway.metrics.registry.get_sample_value
    labels = {"model_name": "tiny"}
    given = Counter({s: int(value("penstock_prompt_tokens_again_total", labels | {"source": s}) or 0) for s in SOURCES})
    return +given, int(value("penstock_generated_tokens_again_total", labels) or 0)


async def charged(http, mesh: Mesh) -> tuple[Counter[str], int]:
    """What the ledger has."""
    await mesh.gateway.reception.admission.idle()
    [row] = (await http.get(f"{mesh.url}/v1/usage", params={"by": "total"})).json()["data"]
    assert row["input_tokens"] == row["computed_tokens"] + sum(row["cached_tokens"].values())
    return +Counter({"computed": row["computed_tokens"], **row["cached_tokens"]}), row["output_tokens"]


async def agreed(http, mesh: Mesh) -> tuple[Counter[str], int]:
    """Checks that all agree; what came again."""
    (ledger, output), (more, told_again), (workers, told) = await charged(http, mesh), again(mesh), counted(mesh)
    assert ledger + more == workers
    assert output + told_again == told
    return more, told_again


async def test_the_ledger_is_what_the_workers_counted(mesh, http, oracle, monkeypatch):
    prompts = [prompt(f"counters/{number}", 90 + number) for number in range(4)]
    for _ in range(2):
        await asyncio.gather(*(ask(http, mesh, tokens, SAMPLING) for tokens in prompts))
        for tokens in prompts:
            await settled(mesh, tokens[: len(tokens) // BLOCK * BLOCK])
    more, _ = await agreed(http, mesh)
    assert not more, "nothing moved"
    assert (await charged(http, mesh))[0].total() > (await charged(http, mesh))[0]["computed"]

    copies = await http.post(f"{mesh.url}/v1/completions", json=body_of(prompt("copies", 90), SAMPLING) | {"n": 3})
    assert copies.status_code == 200
    more, _ = await agreed(http, mesh)
    assert more.total() == 2 * 90, "two of three choices"

    failures = 3
    for served in mesh.decode:
        whole = served.worker.generate

        async def generate(request, work, source=None, relay=None, *, whole=whole, **more):
            """Fails once in a while; without the relay, so that it sees every token."""
            nonlocal failures
            tokens = 0
            async with aclosing(whole(request, work, source, **more)) as updates:
                async for update in updates:
                    yield update
                    tokens += len(update.tokens)
                    if tokens >= 5 and failures:
                        failures -= 1
                        raise Unavailable("the step failed")

        monkeypatch.setattr(served.worker, "generate", generate)
    before, replans = more.total(), mesh.gateway.metrics.of("tiny").replans._value.get()
    moved = [prompt(f"moved/{number}", 90) for number in range(3)]
    answers = await asyncio.gather(*(ask(http, mesh, tokens, SAMPLING) for tokens in moved))
    for tokens, answer in zip(moved, answers, strict=True):
        assert answer.ids == (await oracle(tokens, SAMPLING)).ids
    more, _ = await agreed(http, mesh)
    assert mesh.gateway.metrics.of("tiny").replans._value.get() == replans + 3 and not failures
    assert more.total() >= before + 3 * 95, "three prompts, each with the five tokens that were there"
