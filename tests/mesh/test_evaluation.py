"""Evaluation's column with constrained decoding: the embedded model behind a mesh, asked by the official client."""

from __future__ import annotations

import json
from functools import partial
from itertools import chain
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI, NotFoundError

from penstock.cli.evaluating import ask_mesh, second_column
from penstock.cli.mesh import MeshOptions
from penstock.cli.view import View
from penstock.models import embedded, evaluate
from penstock.models.export import load
from penstock.models.judging import Written
from penstock.models.served import LABELS, answers, score_served
from penstock.models.turns import AssistantTurn, documents, fitting
from penstock.testing.mesh import MeshSetup

MODEL = embedded("penstock-mini")
KINDS = ("L1", "everyday")
COUNT = 2


@pytest.fixture(scope="module")
async def url(meshes):
    setup = MeshSetup(model=MODEL, aggregated=True, model_name="mini", engine={"dtype": "float32"})
    async with meshes(setup) as mesh:
        yield mesh.url


@pytest.fixture(scope="module")
async def client(url):
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=60) as client:
        yield client


def allowed(turn: AssistantTurn, found: Written) -> bool:
    """Whether the grammar has nothing against it: calls of tools that there are, or JSON, that follow their schemas."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in turn.tools}
    try:
        values = [(schemas[name], json.loads(arguments)) for name, arguments in found.calls or ()]
        values += [(turn.schema, json.loads(found.text))] if turn.schema else []
        for schema, value in values:
            jsonschema.validate(value, {**schema, "additionalProperties": False})
    except (KeyError, ValueError, jsonschema.ValidationError):
        return False
    return bool(values)


def shown(found: Written) -> Any:
    return found.calls or json.loads(found.text)


async def test_where_the_grammar_leaves_the_choice_the_mesh_writes_what_the_free_decoder_writes(client):
    net, tokenizer = load(MODEL)
    docs = [list(fitting(tokenizer, doc, 1500)) for doc in documents((*KINDS, "json"), COUNT, 1)]
    asked = [[part for part in doc if part[0].label in LABELS] for doc in docs]
    found = await answers(client, "mini", [[turn for turn, *_ in doc] for doc in asked])
    same = 0
    for (turn, prompt, right), (answered, constrained) in zip(chain(*asked), found, strict=True):
        assert answered is turn
        free = evaluate.written(net, tokenizer, prompt, len(right) + 40)
        if allowed(turn, free):
            assert shown(constrained) == shown(free)
            same += 1
        elif free.calls != []:
            assert allowed(turn, constrained), "what it could not have written freely"
    assert same >= 8


async def test_the_same_turns_are_scored_and_nothing_is_lost(client, monkeypatch):
    """The gateway's prompts are those of the free decoder, and what that gets right the mesh gets right."""
    net, tokenizer = load(MODEL)
    create, prompts = client.chat.completions.create, []

    async def noted(**request: Any) -> Any:
        answer = await create(**request)
        prompts.append(answer.usage.prompt_tokens)
        return answer

    monkeypatch.setattr(client.chat.completions, "create", noted)
    served = await score_served(client, "mini", tokenizer, count=1, seed=1, kinds=KINDS)
    free = evaluate.score(net, tokenizer, 1, 1, kinds=(*KINDS, "json"))
    assert served.total == {name: free.total[name] for name in served.total}
    assert {"tool_exact", "tool_name", "tool_exact_L1", "tool_exact_everyday", "json_valid", "json_exact"} <= {
        *served.total
    }
    assert served.right["json_valid"] == served.total["json_valid"] > 0, "valid by construction"
    assert all(served.right[name] >= free.right[name] for name in served.total if "exact" in name)
    wanted = [
        len(prompt)
        for doc in documents((*KINDS, "json"), 1, 1)
        for turn, prompt, _ in fitting(tokenizer, doc, 4096)
        if turn.label in LABELS
    ]
    assert sorted(prompts) == sorted(wanted)


async def test_a_mesh_that_runs_already_is_asked_and_one_that_does_not_is_named(url, capsys):
    options, into = MeshOptions(port=0), []
    ask = partial(ask_mesh, "mini", MODEL, count=1, seed=1, kinds=("L1",))
    assert await second_column(options, url, ask, into, View("warning")) == 0
    [tally] = into
    assert tally.total["tool_exact_L1"] == tally.total["tool_exact"] > 0
    other = partial(ask_mesh, "maxi", MODEL, count=1, seed=1, kinds=("L1",))
    assert await second_column(options, url, other, into, View("warning")) == 1
    assert "the evaluation broke off" in (said := capsys.readouterr().err) and "maxi" in said and "mini" in said


async def test_the_first_refusal_ends_the_asking(client):
    doc = next(documents(("L1",), 1, 1))
    turns = [turn for turn, *_ in fitting(load(MODEL)[1], doc, 4096)]
    with pytest.raises(NotFoundError, match="maxi"):
        await answers(client, "maxi", [turns, turns])
