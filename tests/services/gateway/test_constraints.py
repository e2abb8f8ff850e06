"""What an answer must be, in the words of every server with this API: workers get a grammar, or the client a 400."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import grpc
import httpx2
import pytest
from llguidance import LLTokenizer
from pydantic import BaseModel
from tests.libs.grammar.walking import accepts

from penstock.rpc.errors import from_rpc
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

PACE_S = 0.05
HELLO = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BASE: dict[str, dict[str, Any]] = {CHAT: {"model": "tiny", "messages": HELLO}, TEXT: {"model": "tiny", "prompt": "hi"}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NAMED = {"name": "person", "schema": PERSON, "strict": True}
ANN, LIST = '{"name": "Ann", "age": 3}', "[1]"
GBNF = 'root ::= ("a" | "b") digit\ndigit ::= [0-9]'


@pytest.fixture
async def post(setup):
    async with httpx2.AsyncClient(base_url=setup.url, timeout=60) as client:

        async def send(path: str, **fields):
            return await client.post(path, json={**BASE[path], **fields})

        yield send


def grammars(setup) -> set[str]:
    return {
        request.sampling.grammar
        for worker in (*setup.mesh.prefills, *setup.mesh.decodes)
        for request in worker.requests
    }


@pytest.fixture
def read(setup):
    """Whether the grammar that the workers got has a text."""
    tokenizer = LLTokenizer(setup.tokenizer.to_str())

    def accepted(text: str) -> bool:
        [grammar] = grammars(setup)
        return accepts(grammar, text, tokenizer)

    return accepted


SERVED = [
    ({"response_format": {"type": "json_object"}}, ANN, LIST),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, ANN, '{"name": "Ann"}'),
    ({"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": False}}}, ANN, "{}"),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, ANN, "{}"),
    ({"response_format": {"type": "regex", "pattern": "[ab]+"}}, "abab", "abc"),
    ({"response_format": {"type": "grammar", "grammar": GBNF}}, "b7", "b"),
    ({"structured_outputs": {"json": PERSON}}, ANN, "{}"),
    ({"structured_outputs": {"json": json.dumps(PERSON)}}, ANN, "{}"),
    ({"structured_outputs": {"regex": "[ab]+"}}, "ab", "c"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
    ({"structured_outputs": {"grammar": 'start: "a" "b"*'}}, "abb", "b"),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, ANN, LIST),
    ({"guided_json": PERSON}, ANN, "{}"),
    ({"guided_json": json.dumps(PERSON), "guided_decoding_backend": "xgrammar"}, ANN, "{}"),
    ({"guided_regex": "[ab]+"}, "ab", "c"),
    ({"guided_choice": ["yes", "no"]}, "yes", "y"),
    ({"guided_grammar": GBNF}, "a1", "1"),
    ({"grammar": GBNF}, "a1", "1"),
    ({"json_schema": PERSON}, ANN, "{}"),
    ({"json_schema": json.dumps(PERSON)}, ANN, "{}"),
    ({"format": "json"}, ANN, LIST),
    ({"format": PERSON}, ANN, "{}"),
    ({"regex": "[ab]+"}, "ab", "c"),
    ({"ebnf": GBNF}, "a1", "1"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("fields", "right", "wrong"), SERVED, ids=lambda value: str(value)[:60])
async def test_every_word_for_it_reaches_the_workers(post, read, path, fields, right, wrong) -> None:
    answer = await post(path, n=2, **fields)
    assert answer.status_code == 200, answer.text
    assert read(right) and not read(wrong)
    assert read(f"<think>Ann, I think.</think>\n\n{right}") is (path == CHAT)


async def test_the_official_client_parses_into_a_type(setup, read) -> None:
    class Pet(BaseModel):
        name: str
        legs: int | None

    setup.says('{"name": "Tom", "legs": 4}')
    answer = await setup.client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Pet)
    assert answer.choices[0].message.parsed == Pet(name="Tom", legs=4)
    assert read('{"name": "", "legs": null}') and not read('{"name": ""}')


@pytest.mark.parametrize("nothing", [{"type": "text"}, None])
async def test_any_text(setup, post, nothing) -> None:
    assert (await post(CHAT, response_format=nothing, regex="", format="", grammar="")).status_code == 200
    assert grammars(setup) == {""}


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name", "is req"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "is required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
            "1 to 64 characters",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}},
            "response_format.json_schema.shema",
            "did you mean schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"properties": {"a": {"not": {}}}}},
                }
            },
            "response_format.json_schema.schema.properties.a.not",
            "is not supported",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be text, json_object or json_schema"),
        ({"response_format": {}}, "response_format.type", "is required"),
        ({"response_format": "json"}, "response_format", "Expected `object`"),
        ({"response_format": {"type": "regex"}}, "response_format.pattern", "is required"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "is not supported"),
        ({"structured_outputs": {"rejex": "a"}}, "structured_outputs.rejex", "did you mean regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must have 1 to 1000"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is not valid JSON"),
        ({"structured_outputs": {"json": PERSON, "regex": "a"}}, "structured_outputs.regex", "structured_outputs.json"),
        ({"guided_json": PERSON, "guided_regex": "a"}, "guided_json", "guided_regex says already"),
        ({"response_format": {"type": "json_object"}, "format": "json"}, "format", "response_format says already"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"regex": "("}, "regex", "no regular expression"),
        ({"grammar": "root ::= other"}, "grammar", "there is no rule 'other'"),
        ({"ebnf": 'start: "a" <|im_end|>'}, "ebnf", "special tokens"),
        ({"format": "yaml"}, "format", "is not valid JSON"),
        ({"format": {"const": "<|im_end|>"}}, "format.const", "control token"),
        ({"json_schema": {"$ref": "http://10.0.0.1/a.json"}}, "json_schema.$ref", "only references to #"),
        ({"json_schema": {"type": "string", "format": "byte"}}, "json_schema.format", "'byte' is not supported"),
        ({"guided_choice": "yes"}, "guided_choice", "must be a list of strings"),
        ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern", "is not supported"),
    ],
)
async def test_what_can_not_be_followed_is_named(setup, post, fields, field, says) -> None:
    for path in (CHAT, TEXT):
        error = (await post(path, **fields)).json()["error"]
        assert (error["param"], error["type"]) == (field, "invalid_request_error")
        assert error["message"].startswith(f"{field}: ") and says in error["message"]
    assert setup.mesh.router.asks == []


async def test_allowed_tokens_are_the_only_ones(setup, post, read) -> None:
    """Without an end token among them, the answer is as long as it may be."""
    letters = [setup.ids(letter)[0] for letter in "abc"]
    for tokens, least in ((letters, 4), ([*letters, setup.script.eos], 0)):
        assert (await post(CHAT, allowed_token_ids=tokens, max_tokens=4)).status_code == 200
        assert read("cab") and read("") and not read("cabd")
        [sampling] = [request.sampling for request in setup.mesh.decodes[0].requests]
        assert sampling.min_tokens == least
        await setup.mesh.reset(setup.script)


@pytest.mark.parametrize(
    ("fields", "status", "field"),
    [
        ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, 422, "allowed_token_ids"),
        ({"allowed_token_ids": [70], "stop_token_ids": [70]}, 400, "allowed_token_ids"),
        ({"allowed_token_ids": [70], "regex": "a"}, 400, "allowed_token_ids"),
        ({"allowed_token_ids": ["a"]}, 400, "allowed_token_ids[0]"),
        (
            {"allowed_token_ids": [70], "tools": [{"type": "function", "function": {"name": "f"}}]},
            400,
            "allowed_token_ids",
        ),
    ],
)
async def test_allowed_tokens_that_can_not_be(post, fields, status, field) -> None:
    answer = await post(CHAT, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_stop_string_is_shown_to_who_wants_it(setup, post, path, name) -> None:
    setup.says("one two three four")
    for shown in (True, False, None):
        choice = (await post(path, stop=["three", "wo t"], **{name: shown})).json()["choices"][0]
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        assert (text, choice["finish_reason"]) == ("one two t" if shown else "one t", "stop")
    unstopped = (await post(path, stop=["five"], **{name: True})).json()["choices"][0]
    assert (unstopped["text"] if path == TEXT else unstopped["message"]["content"]) == "one two three four"


@pytest.fixture
async def stub(setup):
    async with grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
        yield gateway_pb2_grpc.GatewayStub(channel)


def by_grpc(**constraint: Any) -> gateway_pb2.ChatCompletionRequest:
    return gateway_pb2.ChatCompletionRequest(
        model="tiny",
        messages=[gateway_pb2.ChatMessage(role="user", content="hi")],
        constraint=gateway_pb2.AnswerConstraint(**constraint),
    )


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        ({"json_object": True}, ANN, LIST),
        ({"json_schema": json.dumps(PERSON)}, ANN, "{}"),
        ({"regex": "[ab]+"}, "ab", "c"),
        ({"choice": gateway_pb2.ChoiceOfTexts(texts=["yes", "no"])}, "no", "n"),
        ({"grammar": GBNF}, "a1", "1"),
        ({}, LIST, None),
        ({"json_object": False}, LIST, None),
    ],
)
async def test_constraints_by_grpc(setup, stub, read, constraint, right, wrong) -> None:
    async for _ in stub.ChatCompletion(by_grpc(**constraint)):
        pass
    if wrong is None:
        assert grammars(setup) == {""}
    else:
        assert read(right) and not read(wrong)


async def test_what_can_not_be_followed_is_named_by_grpc(stub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.ChatCompletion(by_grpc(json_schema='{"items": {"not": {}}}')):
            pass
    error = from_rpc(caught.value)
    assert (error.http_status, error.field) == (400, "constraint.json_schema.items.not")


async def test_a_deadline_holds_while_a_grammar_is_made(setup, stub) -> None:
    terms = " & ".join(f"/(?s:.*)a{{{number}}}b(?s:.*)/" for number in range(1, 40))
    begin = time.perf_counter()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.ChatCompletion(by_grpc(grammar=f"start: WORD // late\nWORD: {terms}"), timeout=0.5):
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.perf_counter() - begin < 1.5
    async with asyncio.timeout(10):
        await setup.gateway.reception.admission.idle()


async def test_a_hostile_grammar_stops_nobody_elses_stream(setup, post) -> None:
    """One that a compiler works on for minutes is refused within two seconds of a processor, however many of the clock
    those take; a stream beside it keeps its pace."""
    setup.script.say = lambda request: setup.ids("word ") * 600
    setup.script.pace_s = PACE_S
    assert (await post(CHAT, max_tokens=1, regex="a")).status_code == 200  # the helper has started
    terms = " & ".join(f"/(?s:.*)a{{{number}}}b(?s:.*)/" for number in range(1, 40))
    attack = asyncio.ensure_future(post(CHAT, grammar=f"start: WORD\nWORD: {terms}"))
    patterns = {f"^p{number}_": {"type": "string"} for number in range(10_000)}
    other = asyncio.ensure_future(post(CHAT, json_schema={"type": "object", "patternProperties": patterns}))
    stream = await setup.client.chat.completions.create(model="tiny", messages=HELLO, stream=True, max_tokens=600)
    last, longest = time.perf_counter(), 0.0
    async for _ in stream:
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        if attack.done() and other.done():
            break
    await stream.close()
    assert attack.done(), "not before the stream's end, half a minute later"
    assert "is too complex" in (await attack).json()["error"]["message"]
    assert (await other).json()["error"]["param"] == "json_schema.patternProperties"
    assert longest < 0.4  # far from both: without a helper it stands still for as long as the compiler works
