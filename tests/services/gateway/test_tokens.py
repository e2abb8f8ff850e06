"""Endpoints that answer with tokens: /tokenize, /detokenize, count_tokens; and that for embeddings, which says no."""

from __future__ import annotations

import anthropic
import httpx2
import openai
import pytest

from penstock.testing.keys import key_file

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the quick <|im_end|> fox"}]
INPUT = "/v1/responses/input_tokens"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
async def post(setup):
    async with httpx2.AsyncClient(base_url=setup.url) as client:

        async def send(path: str, **body):
            return await client.post(path, json=body)

        yield send


@pytest.mark.parametrize("tools", [[], [TOOL]])
async def test_tokens_are_those_of_a_request(setup, post, tools):
    usage = (await setup.client.chat.completions.create(model="tiny", messages=HELLO, tools=tools or openai.omit)).usage
    answer = (await post("/tokenize", messages=HELLO, tools=tools, return_token_strs=True)).json()
    assert answer["tokens"] == list(setup.mesh.prefills[0].requests[-1].prompt_ids)
    assert answer["count"] == usage.prompt_tokens == len(answer["token_strs"]) and answer["max_model_len"] == 2048
    assert "<|im_start|>" in answer["token_strs"]
    shown = (await post("/detokenize", tokens=answer["tokens"])).json()["prompt"]
    assert shown.startswith("<|im_start|>system\nBe brief.") and "the quick <|im_end|> fox" in shown


async def test_raw_prompts(setup, post):
    text = "the quick <|im_end|> føx 🎉"
    answer = (await post("/tokenize", model="tiny", prompt=text)).json()
    assert answer["tokens"] == setup.tokenizer.encode(text).ids and answer["token_strs"] is None
    assert (await post("/detokenize", model="tiny", tokens=answer["tokens"])).json() == {"prompt": text}
    assert (await post("/tokenize", prompt=text, add_special_tokens=False)).json()["count"] == answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"promt": "a"}, 400, "promt"),
        ("/detokenize", {"tokens": [10**6]}, 422, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
async def test_refused_by_name(post, path, body, status, field):
    answer = await post(path, **body)
    assert (answer.status_code, answer.json()["error"]["param"].replace("[...]", "[0]")) == (status, field)


async def test_counting_for_anthropics_client(setup):
    tools = [{"name": "f", "description": "F", "input_schema": {"type": "object", "properties": {}}}]
    request = {"model": "tiny", "system": "Be brief.", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    async with anthropic.AsyncAnthropic(base_url=setup.url, api_key="none", max_retries=0) as client:
        counted = await client.messages.count_tokens(**request)
        message = await client.messages.create(**request, max_tokens=5)
        assert counted.input_tokens == message.usage.input_tokens > 10
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.count_tokens(model="tiny", messages=[])
        assert caught.value.body["error"]["type"] == "invalid_request_error" and caught.value.request_id
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(**{**request, "model": "other"})


async def test_counting_for_responses(setup):
    first = await setup.client.responses.create(model="tiny", input="hi")
    options = {"model": "tiny", "input": "again", "instructions": "Be brief.", "previous_response_id": first.id}
    counted = await setup.client.responses.input_tokens.count(**options)
    second = await setup.client.responses.create(**options)
    assert counted.input_tokens == second.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.BadRequestError):
        await setup.client.responses.input_tokens.count(model="tiny")


async def test_models_for_anthropics_client(setup):
    async with anthropic.AsyncAnthropic(base_url=setup.url, api_key="none", max_retries=0) as client:
        [model] = [model async for model in await client.models.list()]
        assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny") and model.created_at.year > 2000
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.models.retrieve("other")
        assert caught.value.body["error"]["type"] == "not_found_error"


async def test_no_model_makes_embeddings(setup):
    with pytest.raises(openai.BadRequestError, match="this model makes no embeddings"):
        await setup.client.embeddings.create(model="tiny", input="a")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/embeddings", INPUT])
async def test_a_key_is_asked_for(opened, tmp_path, path):
    keys = key_file(tmp_path / "keys.json", {"key-of-one": "one"})
    async with opened(api_key="key-of-one", api_keys=keys, server_key="ab" * 16) as setup:
        async with httpx2.AsyncClient(base_url=setup.url) as client:
            assert (await client.post(path, json={})).status_code == 401
            assert (await client.post(path, json={}, headers={"x-api-key": "key-of-one"})).status_code == 400
