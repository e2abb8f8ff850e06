"""Structured output through a running mesh: what the embedded model answers is valid by construction, however it is
asked for, and however little the model knows of it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI

from penstock.testing.mesh import MeshSetup

MODELS = Path(__file__).parents[2] / "libs/penstock/models"
ASK = [{"role": "user", "content": "Describe a city as JSON."}]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["capital", "port", "village"]},
        "founded": {"type": "integer", "minimum": 100, "maximum": 2000},
        "rivers": {"type": "array", "items": {"$ref": "#/$defs/river"}, "minItems": 1, "maxItems": 3},
        "twin": {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]},
    },
    "required": ["name", "kind", "founded", "rivers", "twin"],
    "additionalProperties": False,
    "$defs": {
        "river": {
            "type": "object",
            "properties": {
                "km": {"type": "integer", "exclusiveMinimum": 0, "maximum": 7000},
                "wet": {"type": "boolean"},
            },
            "required": ["km"],
            "additionalProperties": False,
        }
    },
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}


@pytest.fixture(scope="module")
async def mesh(meshes):
    draft = str(MODELS / "penstock-mini-draft")
    setup = MeshSetup(model=MODELS / "penstock-mini", draft=draft, model_name="mini", engine={"draft_always": True})
    async with meshes(setup) as mesh:
        yield mesh


@pytest.fixture(scope="module")
async def client(mesh):
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=60) as client:
        async with asyncio.timeout(20):
            while not verified(await create(client, max_tokens=16))["model"]:
                pass  # requests do not wait for the draft's stream
        yield client


def verified(answer: Any) -> dict[str, int]:
    """Drafts that were, by proposer."""
    return answer.usage.model_extra["penstock"]["drafts"]["verified"]


def judge(text: str) -> None:
    """Whether the text is what an independent validator takes, and has the white space that was promised."""
    value = json.loads(text)
    jsonschema.validate(value, CITY)
    assert re.sub(r"-?\d[\d.eE+-]*", "0", text) == re.sub(r"-?\d[\d.eE+-]*", "0", json.dumps(value, ensure_ascii=False))


async def create(client: AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(model="mini", messages=ASK, **{"max_tokens": 300, **fields})


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
async def test_every_choice_matches_its_schema(client, temperature) -> None:
    answer = await create(client, response_format=SCHEMA, n=3, temperature=temperature, seed=7, logprobs=True)
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        judge(choice.message.content)
    assert sum(len(choice.logprobs.content) for choice in answer.choices) == answer.usage.completion_tokens
    assert min(verified(answer)[proposer] for proposer in ("grammar", "model")) > 0


async def test_the_stream_is_the_whole(client) -> None:
    fields = {"response_format": SCHEMA, "temperature": 1.0, "seed": 11}
    whole = await create(client, **fields)
    text, finish = "", None
    async for chunk in await create(client, **fields, stream=True):
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    assert (text, finish) == (whole.choices[0].message.content, "stop")
    judge(text)


async def test_any_object_and_a_cut_one(client) -> None:
    for seed in range(3):
        answer = await create(client, response_format={"type": "json_object"}, temperature=1.0, seed=seed)
        [choice] = answer.choices
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
    cut = await create(client, response_format=SCHEMA, max_tokens=4, temperature=0.0)
    assert cut.choices[0].finish_reason == "length"
    with pytest.raises(ValueError):
        json.loads(cut.choices[0].message.content)


async def test_a_stop_string_cuts_it_as_any_other_text(client) -> None:
    answer = await create(client, response_format=SCHEMA, stop=['"kind"'], temperature=0.0)
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(r'\{"name": "[^"]*", ', answer.choices[0].message.content)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["Oslo", "Os", "Bergen"]}}, "Oslo|Os|Bergen"),
        ({"guided_regex": r"[A-Z][a-z]{2,5}, \d{2}"}, r"[A-Z][a-z]{2,5}, \d{2}"),
        ({"grammar": 'root ::= item ("-" item){2}\nitem ::= [0-9] | "(" item ")"'}, r"\(*\d\)*(-\(*\d\)*){2}"),
        ({"structured_outputs": {"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{1,8}/'}}, "<[a-z]{1,8}>"),
        ({"format": {"const": {"a": [1, "é"]}}}, re.escape('{"a": [1, "é"]}')),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 2.0])
async def test_other_constraints(client, fields, pattern, temperature) -> None:
    answer = await create(client, extra_body=fields, temperature=temperature, seed=3)
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(pattern, answer.choices[0].message.content)


async def test_a_raw_completion(client) -> None:
    answer = await client.completions.create(
        model="mini", prompt="A city: ", max_tokens=300, extra_body={"guided_json": CITY}, temperature=1.0, seed=5
    )
    assert answer.choices[0].finish_reason == "stop"
    judge(answer.choices[0].text)


async def test_allowed_tokens(client) -> None:
    fields = {"allowed_token_ids": [70, 71, 80, 300], "return_token_ids": True}
    for temperature in (0.0, 3.0):
        answer = await create(client, extra_body=fields, temperature=temperature, seed=1, max_tokens=24)
        [choice] = answer.choices
        assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", 24)
        assert {*choice.token_ids} <= {70, 71, 80, 300}
    ending = await create(client, extra_body={"allowed_token_ids": [70, 2]}, temperature=5.0, seed=1, max_tokens=200)
    assert ending.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_bad_words_are_not_said(client, temperature) -> None:
    """Whole, streamed, and beside a schema, whose own words stand whatever is banned."""
    fields = {"temperature": temperature, "seed": 3, "max_tokens": 60}
    free = (await create(client, **fields)).choices[0].message.content
    words = sorted({*re.findall(r"\w{2,}", free)})[:8]
    assert words
    banned = {**fields, "extra_body": {"bad_words": words, "return_token_ids": True}}
    whole = (await create(client, **banned)).choices[0]
    ids = [token async for chunk in await create(client, **banned, stream=True)
           for choice in chunk.choices for token in getattr(choice, "token_ids", ())]  # fmt: skip
    assert ids == whole.token_ids
    assert not re.search(rf"\b({'|'.join(words)})\b", whole.message.content)
    named = await create(client, response_format=SCHEMA, extra_body={"bad_words": ["name", "kind"]}, **fields)
    assert named.choices[0].message.content.startswith('{"name": "')
