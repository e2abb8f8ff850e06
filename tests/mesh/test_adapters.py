"""Meshes with LoRA adapters: a request for MODEL:ADAPTER gets the tokens of one engine with the merged model, whatever
runs beside it and wherever its KV comes from; and adapters come and go while the mesh runs."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import pytest
from openai import AsyncOpenAI

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.gateway.door.operating import evict_tenant
from penstock.runtime.metrics import WorkerMetrics
from penstock.testing.adapters import fingerprint_of, write_adapter, write_merged
from penstock.testing.checkpoints import write_checkpoint
from penstock.testing.mesh import MeshSetup
from penstock.worker.opening import _figures

from .conftest import TINY
from .support import BLOCK, body_of, drafting, in_pages, prompt, settled, until

NO_SPECIALS = dict.fromkeys(range(256, 260), -100.0)
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=0, logit_bias=NO_SPECIALS)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=11)
NAMES = ("", "one", "two")


@pytest.fixture(scope="module")
def files(tiny, tmp_path_factory):
    """Directories of adapters, and of the models into which they are merged."""
    found = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three"), 1):
        write_adapter(found / name, tiny, seed=seed, strength=0.7, rank=2 + seed)
        write_merged(found / f"merged-{name}", tiny, found / name)
    return found


@pytest.fixture(scope="module")
async def alone(tiny, files):
    """An engine of each merged model, and of the base."""
    async with AsyncExitStack() as stack:
        engines = {}
        for name in (*NAMES, "three"):
            model = files / f"merged-{name}" if name else tiny
            config = EngineConfig(model=model, kv_pool_tokens=8192)
            engines[name] = await stack.enter_async_context(Engine.open(config))

        async def expected(name, tokens, sampling):
            request = Request(f"{name}-{len(tokens)}", tuple(tokens), sampling)
            found = []
            async with aclosing(engines[name].generate(request)) as updates:
                async for update in updates:
                    found += [token.token for token in update.tokens]
            return found

        yield expected


def setup_of(tiny, files, **fields):
    return MeshSetup(model=tiny, engine={"lora": (f"one={files / 'one'}", f"two={files / 'two'}")}, **fields)


@pytest.fixture(scope="module", params=["disaggregated", "aggregated"])
async def mesh(request, tiny, files, tmp_path_factory, meshes, http):
    """Its draft model is one of the base, which is mostly wrong. Of a prefill worker's two ranks each has its part."""
    draft = write_checkpoint(tmp_path_factory.mktemp("draft") / "model", replace(TINY, layers=1, seed=4))
    setup = setup_of(tiny, files, draft=str(draft), aggregated=request.param == "aggregated")
    setup = replace(setup, engine={**setup.engine, "draft_always": True}, prefill_engine={"tp": 2})
    async with meshes(setup) as mesh:
        await drafting(http, mesh)
        yield mesh
        assert mesh.decode[0].worker.engine.stats().drafted > 50, "drafts were verified"


async def ask(http, mesh, name, tokens, sampling, session=""):
    """(token ids, cached tokens) of a request for the model with an adapter."""
    body = body_of(tokens, sampling) | {"model": f"tiny:{name}" if name else "tiny"}
    headers = {"x-session-affinity": session} if session else {}
    answer = await http.post(f"{mesh.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["token_ids"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_all_at_once_and_then_cached(mesh, alone, http, sampling, request):
    """The same prompt to two adapters and the base: each computes its own KV, and finds it again."""
    first = prompt(request.node.callspec.id, 150)
    session = request.node.callspec.id
    cold = await asyncio.gather(*(ask(http, mesh, name, first, sampling, session + name) for name in NAMES))
    for name, (ids, cached) in zip(NAMES, cold, strict=True):
        assert ids == await alone(name, first, sampling), name
        assert cached == 0, "nobody uses another's blocks"
    assert len({tuple(ids) for ids, _ in cold}) == 3
    for name, (ids, _) in zip(NAMES, cold, strict=True):
        second = [*first, *ids, *prompt("more", 100)]
        known = len(first) + len(ids) - 1
        await settled(mesh, [*first, *ids][: known // BLOCK * BLOCK], adapter=fingerprint(mesh, name))
        warm, cached = await ask(http, mesh, name, second, sampling, session + name)
        assert warm == await alone(name, second, sampling), name
        assert cached == (known // BLOCK * BLOCK if mesh.prefill else in_pages(known)), name


def fingerprint(mesh, name):
    return mesh.workers[0].engine.adapters.names[name] if name else ""


async def test_the_official_client_lists_them_and_asks_for_one(mesh, http):
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        models = {model.id: model.model_dump() for model in (await client.models.list()).data}
        assert {name: (model["root"], model["parent"]) for name, model in models.items()} == {
            "tiny": ("tiny", None),
            "tiny:one": ("tiny:one", "tiny"),
            "tiny:two": ("tiny:two", "tiny"),
        }
        assert (await client.models.retrieve("tiny:two")).id == "tiny:two"
        chat = [{"role": "user", "content": "Hello"}]
        said = {
            name: (
                await client.chat.completions.create(
                    model=name,
                    messages=chat,
                    max_tokens=12,
                    temperature=0,
                    seed=1,
                    logit_bias={"257": -100, "259": -100},
                )
            )
            for name in models
        }
        assert {answer.model for answer in said.values()} == set(models)
        assert len({answer.choices[0].message.content for answer in said.values()}) == 3
        assert len({answer.system_fingerprint for answer in said.values()}) == 3
    refused = await http.post(f"{mesh.url}/v1/completions", json={"model": "tiny:three", "prompt": "x"})
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert error["code"] == "model_not_found" and error["param"] == "model"
    assert error["message"] == "the model 'tiny:three' does not exist; there is 'tiny', 'tiny:one', 'tiny:two'"


async def ctl(mesh, *words):
    """(exit code, JSON) of `penstock ctl lora`."""
    import sys

    command = (sys.executable, "-m", "penstock.cli", "ctl", "lora", *words, "--router", mesh.router.address, "--json")
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    return child.returncode, json.loads(out or b"null")


async def test_they_come_and_go_while_the_mesh_runs(tiny, files, alone, meshes, http, tmp_path):
    tokens = prompt("come and go", 60)
    async with meshes(setup_of(tiny, files)) as mesh:
        code, found = await ctl(mesh, "load", f"three={files / 'three'}")
        assert code == 0 and found["asked_for_as"] == "tiny:three"
        figures = _figures(mesh.workers[0].engine)
        assert figures[WorkerMetrics.ADAPTERS] == figures[WorkerMetrics.ADAPTERS_HELD] == 3
        assert figures[WorkerMetrics.ADAPTER_LOADS] == 3 and figures[WorkerMetrics.ADAPTER_BYTES] > 0
        assert [worker["done"] for worker in found["workers"]] == [True, True]
        async with mesh.gateway.view.changed:
            await mesh.gateway.view.changed.wait_for(lambda: mesh.gateway.view.known("tiny:three"))
        ids, _ = await ask(http, mesh, "three", tokens, GREEDY)
        assert ids == await alone("three", tokens, GREEDY)
        code, found = await ctl(mesh, "list")
        assert code == 0
        assert {one["asked_for_as"]: (one["workers"], one["of"], one["fingerprint"]) for one in found} == {
            f"tiny:{name}": (2, 2, fingerprint_of(files / name, tiny)) for name in ("one", "two", "three")
        }
        code, found = await ctl(mesh, "load", f"four={tmp_path}")
        assert code == 1 and all("adapter_config.json" in worker["error"] for worker in found["workers"])
        code, found = await ctl(mesh, "unload", "three")
        assert code == 0
        async with mesh.gateway.view.changed:
            await mesh.gateway.view.changed.wait_for(lambda: mesh.gateway.view.known("tiny:three") is None)
        refused = await http.post(f"{mesh.url}/v1/completions", json={"model": "tiny:three", "prompt": "x"})
        assert refused.status_code == 404 and "'tiny:two'" in refused.json()["error"]["message"]
        assert (await ctl(mesh, "unload", "three"))[0] == 1


async def test_a_worker_that_joins_later_loads_what_the_others_have(tiny, files, meshes):
    from penstock.decode.config import DecodeConfig
    from penstock.decode.service import open_decode

    async with meshes(setup_of(tiny, files, aggregated=True, kvstore=False)) as mesh:
        config = DecodeConfig(
            engine=EngineConfig(tiny, kv_pool_tokens=8192),
            model_name="tiny",
            router=(mesh.router.address,),
            role="both",
        )
        async with open_decode(config) as late:
            registry = mesh.router.planner.registry
            await until(
                lambda: [len(own.seats) for own in registry.adapted().values()] == [2, 2],
                "both workers have both adapters",
                seconds=30,
            )
            assert late.worker.engine.adapters.names == mesh.workers[0].engine.adapters.names


async def test_two_directories_under_one_name_share_nothing(tiny, files, alone, meshes, http, tmp_path):
    """The name of blocks holds what the adapter is, not what it is called."""
    tokens, directory = prompt("replaced", 150), tmp_path / "adapter"
    shutil.copytree(files / "one", directory)
    async with meshes(MeshSetup(model=tiny, engine={"lora": (f"mine={directory}",)})) as mesh:
        ids, cached = await ask(http, mesh, "mine", tokens, GREEDY)
        assert (ids, cached) == (await alone("one", tokens, GREEDY), 0)
        before = mesh.gateway.view.known("tiny:mine").adapter
        code, _ = await ctl(mesh, "load", f"mine={files / 'two'}")
        assert code == 0
        async with mesh.gateway.view.changed:
            await mesh.gateway.view.changed.wait_for(lambda: mesh.gateway.view.known("tiny:mine").adapter != before)
        ids, cached = await ask(http, mesh, "mine", tokens, GREEDY)
        assert (ids, cached) == (await alone("two", tokens, GREEDY), 0)


async def test_an_eviction_reaches_what_was_computed_with_an_adapter_that_is_gone(tiny, files, meshes, http):
    tokens = prompt("evicted", 150)
    async with meshes(setup_of(tiny, files, aggregated=True, kvstore=False)) as mesh:
        own = fingerprint(mesh, "one")
        _, cached = await ask(http, mesh, "one", tokens, GREEDY)
        _, again = await ask(http, mesh, "one", tokens, GREEDY)
        assert cached == 0 < again
        assert (await ctl(mesh, "unload", "one"))[0] == 0
        await evict_tenant(mesh.gateway.reception, "default", {})
        assert (await ctl(mesh, "load", f"one={files / 'one'}"))[0] == 0
        async with mesh.gateway.view.changed:
            await mesh.gateway.view.changed.wait_for(lambda: mesh.gateway.view.known("tiny:one"))
        assert fingerprint(mesh, "one") == own
        _, after = await ask(http, mesh, "one", tokens, GREEDY)
        assert after < BLOCK, "no whole block is found any more"
