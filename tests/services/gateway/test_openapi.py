"""The OpenAPI document says what is served: each route, each field, and answers as they are."""

from __future__ import annotations

import httpx2
import msgspec
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from penstock.gateway.api.fields import fields_of
from penstock.gateway.api.openapi.document import OPERATIONS, document
from penstock.gateway.door.http import routes

HELLO = [{"role": "user", "content": "hi"}]
DOCUMENT = msgspec.json.decode(document())


@pytest.fixture
async def client(setup):
    async with httpx2.AsyncClient(base_url=setup.url) as made:
        yield made


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]})


async def test_it_is_served_and_valid(client):
    answer = await client.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json" and answer.json() == DOCUMENT
    assert DOCUMENT["openapi"] == "3.1.0"
    validate(DOCUMENT)


def test_every_route_is_in_it_and_nothing_else(setup):
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in routes(setup.gateway.reception)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert served == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}


def test_every_field_is_in_it_with_its_fate():
    waiting = [operation.body for operation in OPERATIONS if operation.body is not None]
    seen = set()
    while waiting:
        body = waiting.pop()
        if body in seen:
            continue
        seen.add(body)
        schema, told = DOCUMENT["components"]["schemas"][body.__name__], fields_of(body)
        assert {*schema["properties"]} == {*told.fates} and schema["additionalProperties"] is False
        for name, fate in told.fates.items():
            assert schema["properties"][name].get("x-penstock-fate", "honoured") == fate.kind, name
        waiting += [kind for kinds in told.inner.values() for kind in kinds]
    assert len(seen) > 25


REQUESTS = [
    ("/v1/chat/completions", {"model": "tiny", "messages": HELLO, "temperature": 0.5, "stop": ["x"]}),
    ("/v1/completions", {"model": "tiny", "prompt": "a", "echo": None}),
    ("/v1/responses", {"model": "tiny", "input": [{"role": "user", "content": "a"}], "metadata": {"a": "b"}}),
    ("/v1/responses/input_tokens", {"model": "tiny", "input": "a"}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": HELLO, "system": [{"type": "text", "text": "s"}]}),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": HELLO}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1]}),
    ("/v1/sessions/hint", {"prompt_cache_key": "a", "ended": True}),
    ("/v1/models", None),
    ("/v1/models/{name}", None),
    ("/health", None),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[path for path, _ in REQUESTS])
async def test_requests_and_answers_are_as_it_says(client, path, body):
    operation = next(found for found in OPERATIONS if found.path == path)
    url = path.replace("{name}", "tiny")
    answer = await (client.get(url) if body is None else client.post(url, json=body))
    assert answer.status_code == 200, answer.text
    validator(operation.answer.__name__).validate(answer.json())
    if body is not None:
        validator(operation.body.__name__).validate(body)
        wrong = {**body, "made_up": 1}
        assert not validator(operation.body.__name__).is_valid(wrong)
        refused = await client.post(url, json=wrong)
        assert refused.status_code == 400
        validator(operation.error.__name__).validate(refused.json())


async def test_stored_responses_are_as_it_says(client):
    made = (await client.post("/v1/responses", json={"model": "tiny", "input": "a"})).json()
    one = f"/v1/responses/{made['id']}"
    validator("ResponseAnswer").validate((await client.get(one)).json())
    validator("ItemsAnswer").validate((await client.get(f"{one}/input_items")).json())
    validator("DeletedAnswer").validate((await client.delete(one)).json())
    validator("ErrorAnswer").validate((await client.delete(one)).json())
