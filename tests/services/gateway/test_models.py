"""Two models behind one gateway: each with its own tokens, workers, sessions and readiness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import anthropic
import grpc
import httpx2
import openai
import pytest
from tokenizers import Tokenizer

from penstock.gateway.completing.sources import read_models
from penstock.gateway.config import GatewayConfig
from penstock.kv.identity import root_key
from penstock.kv.spec import KvSpec
from penstock.runtime.config import ConfigError
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

from . import fakes
from .conftest import Setup

TINY, OTHER = "tiny", "org/other"
SAYS = {TINY: "The quick brown fox.", OTHER: "Une autre voix, tout autrement."}
PROMPT = "une autre voix over the lazy dog"


@dataclass
class Pair:
    """A gateway in front of workers of two models."""

    setup: Setup
    specs: dict[str, KvSpec]
    tokenizers: dict[str, Tokenizer]

    def ids(self, model: str, text: str) -> list[int]:
        return self.tokenizers[model].encode(text, add_special_tokens=False).ids

    async def show(self, *ready: str, joined: Sequence[str] = (TINY, OTHER)) -> None:
        """Workers of the models in `joined` are there, those in `ready` take requests."""
        view = self.setup.gateway.view
        mesh = self.setup.mesh
        mesh.show([mesh.served(name, self.specs[name], ready=name in ready) for name in joined])
        async with view.changed:
            await view.changed.wait_for(
                lambda: (
                    all(view.serves(name) == (name in ready) for name in self.specs)
                    and all((view.known(name) is not None) == (name in joined) for name in self.specs)
                )
            )

    async def says(self, model: str, prompt: str = PROMPT, **headers: str) -> str:
        answer = await self.setup.client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt}], extra_headers=headers
        )
        assert answer.model == model
        return answer.choices[0].message.content


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "other"
    fakes.make_model(directory, ["une autre voix tout autrement", "voix autre"])
    return directory


@pytest.fixture(scope="module")
async def whole(opened, other_dir) -> AsyncIterator[Pair]:
    async with a_pair(opened, other_dir) as pair:
        yield pair


@pytest.fixture
async def pair(whole) -> Pair:
    """The gateway that the tests share, with both models ready."""
    await whole.setup.mesh.until(lambda: whole.setup.mesh.live == 0)
    whole.setup.mesh.router.asks.clear()
    await whole.show(TINY, OTHER)
    return whole


@asynccontextmanager
async def a_pair(opened, other_dir: Path, **settings: object) -> AsyncIterator[Pair]:
    models = other_dir.parent / "models.toml"
    models.write_text(f'["{OTHER}"]\ndir = "other"\n')
    async with opened(models=models, failover_s=0.2, **settings) as setup:
        mine = setup.mesh.spec
        theirs = replace(mine, model="n" * 64, tokenizer=fakes.digest(other_dir / "tokenizer.json"))
        tokenizers = {TINY: setup.tokenizer, OTHER: Tokenizer.from_file(str(other_dir / "tokenizer.json"))}
        pair = Pair(setup, {TINY: mine, OTHER: theirs}, tokenizers)
        namespace = setup.gateway.reception.auth.namespace("default")
        by_root = {root_key(spec, namespace): pair.ids(name, SAYS[name]) for name, spec in pair.specs.items()}
        setup.script.say = lambda request: by_root[request.cache_root]
        setup.script.places = {TINY: 0, OTHER: 1}
        yield pair


async def test_each_answers_with_its_own_tokens(pair):
    assert pair.ids(TINY, PROMPT) != pair.ids(OTHER, PROMPT)
    for place, (model, text) in enumerate(SAYS.items()):
        decode, elsewhere = pair.setup.mesh.decodes[place], pair.setup.mesh.decodes[1 - place]
        seen = len(elsewhere.requests)
        answer = await pair.setup.client.completions.create(model=model, prompt=PROMPT)
        assert (answer.model, answer.choices[0].text) == (model, text)
        assert [*decode.requests[-1].prompt_ids] == pair.ids(model, PROMPT)
        assert pair.setup.mesh.router.asks[-1].model_name == model
        assert len(elsewhere.requests) == seen, "its workers serve another model"


@pytest.mark.parametrize("model", [TINY, OTHER])
async def test_every_api_knows_both(pair, model):
    assert await pair.says(model) == SAYS[model]
    client = pair.setup.client
    stream = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]) == SAYS[model]
    assert (await client.responses.create(model=model, input="hi")).output_text == SAYS[model]
    async with anthropic.AsyncAnthropic(base_url=pair.setup.url, api_key="none", max_retries=0) as other:
        messages = [{"role": "user", "content": "hi"}]
        message = await other.messages.create(model=model, messages=messages, max_tokens=50)
        assert (message.model, message.content[0].text) == (model, SAYS[model])
        counted = await other.messages.count_tokens(model=model, messages=messages)
        assert counted.input_tokens == message.usage.input_tokens
    async with grpc.aio.insecure_channel(pair.setup.gateway.grpc_address) as channel:
        request = gateway_pb2.ChatCompletionRequest(
            model=model, messages=[gateway_pb2.ChatMessage(role="user", content="hi")]
        )
        chunks = [chunk async for chunk in gateway_pb2_grpc.GatewayStub(channel).ChatCompletion(request)]
        assert "".join(chunk.content for chunk in chunks) == SAYS[model]


@pytest.mark.parametrize("model", [TINY, OTHER])
async def test_tokenizing_is_the_models_own(pair, model):
    async with httpx2.AsyncClient(base_url=pair.setup.url) as http:
        asked = {"prompt": PROMPT, "add_special_tokens": False}
        answer = (await http.post("/tokenize", json={"model": model, **asked})).json()
        assert answer["tokens"] == pair.ids(model, PROMPT) and answer["max_model_len"] == fakes.CONTEXT
        back = await http.post("/detokenize", json={"model": model, "tokens": answer["tokens"]})
        assert back.json() == {"prompt": PROMPT}
        assert (await http.post("/tokenize", json=asked)).json()["tokens"] == pair.ids(TINY, PROMPT)
        assert (await http.post("/tokenize", json={"model": "no", **asked})).status_code == 404


async def test_both_are_listed(pair):
    await pair.show(OTHER)
    listed = (await pair.setup.client.models.list()).data
    assert [(model.id, model.model_dump()["ready"]) for model in listed] == [(TINY, False), (OTHER, True)]
    assert (await pair.setup.client.models.retrieve(OTHER)).id == OTHER
    with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist"):
        await pair.setup.client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist"):
        await pair.says("other")
    async with anthropic.AsyncAnthropic(base_url=pair.setup.url, api_key="none", max_retries=0) as client:
        assert [model.id async for model in await client.models.list()] == [TINY, OTHER]
        assert (await client.models.retrieve(OTHER)).id == OTHER
    async with grpc.aio.insecure_channel(pair.setup.gateway.grpc_address) as channel:
        answer = await gateway_pb2_grpc.GatewayStub(channel).ListModels(gateway_pb2.ListModelsRequest())
        assert [model.id for model in answer.models] == [TINY, OTHER]


@pytest.mark.parametrize(("there", "missing"), [(TINY, OTHER), (OTHER, TINY)])
async def test_one_without_workers_does_not_hold_up_the_other(pair, there, missing):
    await pair.show(there, joined=[there])
    with pytest.raises(openai.InternalServerError) as caught:
        await pair.says(missing)
    assert (caught.value.status_code, caught.value.body["code"]) == (503, "not_ready")
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert await pair.says(there) == SAYS[there]
    async with httpx2.AsyncClient(base_url=pair.setup.url) as http:
        assert [(await http.get(path)).status_code for path in ("/readyz", "/health")] == [200, 200]
        await pair.show(joined=[])
        assert [(await http.get(path)).status_code for path in ("/readyz", "/health")] == [503, 503]


async def test_a_model_whose_workers_have_other_tokens_is_not_served(pair):
    mesh, view = pair.setup.mesh, pair.setup.gateway.view
    mesh.show([mesh.served(TINY), mesh.served(OTHER)])  # both with the tokenizer of the one
    async with asyncio.timeout(5), view.changed:
        await view.changed.wait_for(lambda: not view.serves(OTHER))
    assert await pair.says(TINY) == SAYS[TINY]
    with pytest.raises(openai.InternalServerError):
        await pair.says(OTHER)


async def test_a_session_of_both_keeps_their_tokens_apart(pair):
    """One session key, two models in turns: each finds its own last prompt, and the prompt is its own every time."""
    header = {"x-session-affinity": "shared"}
    messages = [{"role": "user", "content": PROMPT}]
    known: dict[str, list[int]] = {TINY: [], OTHER: []}
    for _ in range(3):
        for place, model in enumerate(SAYS):
            answer = await pair.setup.client.chat.completions.create(
                model=model, messages=messages, extra_headers=header
            )
            assert answer.choices[0].message.content == SAYS[model]
            use = answer.usage.model_extra["penstock"]["session"]
            known[model].append(use["known_tokens"] if use else 0)
            request = pair.setup.mesh.decodes[place].requests[-1]
            text = pair.tokenizers[model].decode([*request.prompt_ids], skip_special_tokens=False)
            assert PROMPT in text
            assert [*request.prompt_ids] == [*pair.tokenizers[model].encode(text, add_special_tokens=False).ids]
    assert all(counts[0] == 0 < min(counts[1:]) for counts in known.values()), known


async def test_use_is_accounted_by_model(opened, other_dir):
    async with a_pair(opened, other_dir) as pair:
        await pair.show(TINY, OTHER)
        for model in (TINY, OTHER, OTHER):
            await pair.says(model)
        async with httpx2.AsyncClient(base_url=pair.setup.url) as http:
            rows = (await http.get("/v1/usage", params={"by": "total"})).json()["data"]
        assert {row["model"]: row["requests"] for row in rows} == {TINY: 1, OTHER: 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tiny]\ndir = 'other'", "is the name of the model in model_dir already"),
        ("[a]\ndir = 'nowhere'", "tokenizer.json"),
        ("[a]\ndir = 'other'\ntool_format = 'x'", "a.tool_format must be one of hermes"),
        ("[a]\ndirectory = 'other'", "directory"),
        ("[a]", "dir"),
        ("['']\ndir = 'other'", "a model's name has 1 to 256 bytes"),
        ("[a", "is not valid"),
    ],
)
def test_a_wrong_file_of_models_is_refused(model_dir, other_dir, text, message):
    file = other_dir.parent / "wrong.toml"
    file.write_text(text)
    config = GatewayConfig(router="127.0.0.1:1", model_dir=model_dir, models=file)
    with pytest.raises(ConfigError, match=message):
        read_models(config)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_models(config)


def test_further_models_may_be_named_in_the_settings(model_dir, other_dir):
    config = GatewayConfig(router="127.0.0.1:1", model_dir=model_dir, model_name=TINY, also=(f"{OTHER}={other_dir}",))
    assert [(source.name, source.dir) for source in read_models(config)] == [(TINY, model_dir), (OTHER, other_dir)]


@pytest.mark.parametrize(
    ("also", "message"),
    [
        (["other"], "must be NAME=DIRECTORY"),
        (["other="], "must be NAME=DIRECTORY"),
        (["={other}"], "a model's name has 1 to 256 bytes"),
        (["tiny={other}"], "'tiny' is the name of the model in model_dir already"),
        (["a={other}", "a={other}"], "'a' is the name of the model named before"),
        (["a={other}/nowhere"], "tokenizer.json"),
    ],
)
def test_wrong_further_models_are_refused(model_dir, other_dir, also, message):
    named = tuple(one.format(other=other_dir) for one in also)
    config = GatewayConfig(router="127.0.0.1:1", model_dir=model_dir, model_name="tiny", also=named)
    with pytest.raises(ConfigError, match=message):
        read_models(config)
