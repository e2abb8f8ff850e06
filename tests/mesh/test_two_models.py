"""Two models behind one gateway, each with workers and a store of its own: streams of both at once, counted apart."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from penstock.decode.config import DecodeConfig
from penstock.decode.service import open_decode
from penstock.engine.config import EngineConfig
from penstock.engine.request import SamplingParams
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.service import open_kvstore
from penstock.testing.mesh import MeshSetup

from .support import body_of, prompt

SAMPLING = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
EACH = 3


@pytest.fixture(scope="module")
async def mesh(tiny, other, meshes, tmp_path_factory):
    file = tmp_path_factory.mktemp("two") / "models.toml"
    file.write_text(f'["org/other"]\ndir = "{other}"\n')
    async with (
        meshes(MeshSetup(model=tiny, aggregated=True, gateway={"models": file})) as mesh,
        AsyncExitStack() as own,
    ):
        router = mesh.router.address
        store = await own.enter_async_context(
            open_kvstore(KvStoreConfig(host_bytes=64 << 20, router=router, host_id="other"))
        )
        settings = {
            "engine": EngineConfig(other, kv_pool_tokens=8192),
            "model_name": "org/other",
            "router": router,
            "kvstore": store.address,
            "host_id": "other",
        }
        await own.enter_async_context(open_decode(DecodeConfig(role="both", draft="none", **settings)))
        view = mesh.gateway.view
        async with view.changed, asyncio.timeout(30):
            await view.changed.wait_for(lambda: view.serves("tiny") and view.serves("org/other"))
        yield mesh


async def test_streams_of_both_at_once_and_their_accounts(mesh, oracle, http):
    begun = asyncio.Barrier(2 * EACH)

    async def stream(model: str, tokens: list[int], *, together: bool) -> list[int]:
        ids: list[int] = []
        body = body_of(tokens, SAMPLING) | {"model": model, "stream": True}
        async with http.stream("POST", f"{mesh.url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    if together and not ids:
                        await begun.wait()  # every stream has its first token before any is read on
                    chunk = json.loads(line[6:])
                    assert chunk["model"] == model
                    ids += [id for choice in chunk["choices"] for id in choice["token_ids"]]
        return ids

    asked = [(model, prompt(f"two/{number}", 70)) for number in range(EACH) for model in ("tiny", "org/other")]
    async with asyncio.timeout(60):
        found = await asyncio.gather(*(stream(model, tokens, together=True) for model, tokens in asked))
        for (model, tokens), ids in zip(asked, found, strict=True):
            alone = (
                (await oracle(tokens, SAMPLING)).ids if model == "tiny" else await stream(model, tokens, together=False)
            )
            assert ids == alone
        assert found[0] != found[1], "the models say different things"

    usage = (await http.get(f"{mesh.url}/v1/usage", params={"by": "total"})).json()
    rows = {row["model"]: row for row in usage["data"]}
    metrics = mesh.gateway.metrics.registry
    for model, requests in (("tiny", EACH), ("org/other", 2 * EACH)):
        row = rows[model]
        assert (row["requests"], row["input_tokens"], row["output_tokens"]) == (requests, requests * 70, requests * 60)
        named = {"model_name": model}
        assert metrics.get_sample_value("vllm:prompt_tokens_total", named) == row["input_tokens"]
        assert metrics.get_sample_value("vllm:generation_tokens_total", named) == row["output_tokens"]
        computed = named | {"source": "computed"}
        assert metrics.get_sample_value("penstock_prompt_tokens_total", computed) == row["computed_tokens"]
        assert metrics.get_sample_value("vllm:time_to_first_token_seconds_count", named) == requests
    assert set(rows) == {"tiny", "org/other"}
