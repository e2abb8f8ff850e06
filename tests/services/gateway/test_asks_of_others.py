"""Fields that users of other servers send: what the workers get of them."""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx2
import pytest

from penstock.v1 import gateway_pb2, gateway_pb2_grpc

from . import fakes

HELLO = [{"role": "user", "content": "hi"}]
CHAT, TEXT, RESPONSE, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    TEXT: {"prompt": "hi"},
    RESPONSE: {"input": "hi"},
    MESSAGE: {"messages": HELLO, "max_tokens": 50},
}


@pytest.fixture
async def post(setup):
    async with httpx2.AsyncClient(base_url=setup.url, timeout=60) as client:

        async def send(path: str, **fields):
            return await client.post(path, json={"model": "tiny", **BASE[path], **fields})

        yield send


@pytest.fixture
def sent(setup):
    """The last request that the workers got."""
    return lambda: setup.mesh.decodes[0].requests[-1]


def error_of(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["param"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_bad_words_reach_the_workers_as_texts(setup, post, sent, path):
    """Which know what tokens can write them. A space in front, as clients write it that think in tokens, is none of the
    word."""
    assert (await post(path, bad_words=["  fox", "a", "lazy cat "])).status_code == 200
    assert list(sent().sampling.bad_words) == ["fox", "a", "lazy cat "]
    assert (await post(path, bad_words=[])).status_code == 200
    assert not sent().sampling.bad_words


@pytest.mark.parametrize("path", list(BASE))
async def test_a_request_can_do_without_drafts(post, sent, path):
    assert (await post(path, penstock={"drafts": False})).status_code == 200
    assert sent().sampling.no_drafts
    for fields in ({}, {"penstock": {"drafts": True}}):
        assert (await post(path, **fields)).status_code == 200
        assert not sent().sampling.no_drafts
    assert (await post(path, penstock={"drafts": "no"})).status_code == 400


@pytest.mark.parametrize("words", [[""], ["a" * 257], ["a"] * 257, [" \n"], "a", [1], 7])
async def test_bad_words_that_can_not_be(post, words):
    status, field = error_of(await post(CHAT, bad_words=words))
    assert (status, field.partition("[")[0]) == (400, "bad_words")


def prompt_of(setup, request) -> str:
    return setup.tokenizer.decode([*request.prompt_ids], skip_special_tokens=False)


START = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("begun", ["The quick", " The quick ", "", "The\n\n", "<|im_end|> is text", "中"])
async def test_an_answer_continues_the_last_message(setup, post, sent, begun):
    """Its exact text, in each API that has a way to say so; what is counted is what is sent."""
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    chat = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = set()
    for path, fields in ((CHAT, chat), (MESSAGE, {"messages": messages})):
        answer = await post(path, **fields)
        assert answer.status_code == 200, answer.text
        assert prompt_of(setup, sent()) == START + begun
        tokens.add(tuple(sent().prompt_ids))
        said = answer.json()
        text = said["choices"][0]["message"]["content"] if path == CHAT else said["content"][0]["text"]
        assert text == "The quick brown fox."
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        counted = (await client.post("/tokenize", json={"model": "tiny", **chat})).json()["tokens"]
        number = await client.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": messages})
    assert tokens == {tuple(counted)} and number.json()["input_tokens"] == len(counted)


async def test_an_answer_continues_reasoning(setup, post):
    setup.says("on.</think>\n\nFine.")
    for begun, reasoning in (("<think>\nGo ", "on."), ("<think>a</think>b", "")):
        messages = [*HELLO, {"role": "assistant", "content": begun}]
        answer = await post(CHAT, messages=messages, continue_final_message=True)
        message = answer.json()["choices"][0]["message"]
        assert message.get("reasoning_content", "") == reasoning
        assert message["content"].endswith("Fine.")


async def test_what_no_answer_can_continue(post):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*HELLO, {"role": "assistant", "content": "a", "tool_calls": [call]}]
    assert error_of(await post(CHAT, messages=messages, continue_final_message=True)) == (400, "messages")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert error_of(await post(CHAT, **both)) == (400, "continue_final_message")
    used = [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]
    answer = await post(MESSAGE, messages=[*HELLO, {"role": "assistant", "content": used}])
    assert (answer.status_code, answer.json()["error"]["message"].partition(":")[0]) == (400, "messages")


async def test_without_a_generation_prompt(setup, post, sent):
    await post(CHAT, add_generation_prompt=False)
    assert prompt_of(setup, sent()) == "<|im_start|>user\nhi<|im_end|>\n"


async def test_the_next_turn_after_a_continued_answer(setup, post, sent):
    """It holds the whole text, and the session goes on."""
    messages = [*HELLO, {"role": "assistant", "content": "Well. "}]
    said = await post(CHAT, messages=messages, continue_final_message=True, prompt_cache_key="s")
    whole = "Well. " + said.json()["choices"][0]["message"]["content"]
    turn = [*HELLO, {"role": "assistant", "content": whole}, *HELLO]
    assert (await post(CHAT, messages=turn, prompt_cache_key="s")).status_code == 200
    assert prompt_of(setup, sent()) == f"{START}{whole}<|im_end|>\n{START}"


EFFORTS = (
    (CHAT, {"reasoning_effort": "high"}),
    (CHAT, {"reasoning": {"effort": "high"}}),
    (CHAT, {"chat_template_kwargs": {"reasoning_effort": "high"}}),
    (RESPONSE, {"reasoning": {"effort": "high"}}),
    (MESSAGE, {"output_config": {"effort": "high"}}),
)


@pytest.fixture(scope="module")
async def reading(opened, tmp_path_factory):
    """A model whose template reads variables."""
    directory = tmp_path_factory.mktemp("reading") / fakes.MODEL
    fakes.make_model(directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{{ '[' + (reasoning_effort or 'none') + '|' + (enable_thinking | string) + '|' + (mood or '') + ']' }}"
        + settings["chat_template"]
    )
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    async with opened(model_dir=directory) as made:
        yield made


@pytest.mark.parametrize(("path", "fields"), EFFORTS)
async def test_effort_is_given_to_templates_that_read_it(reading, post, path, fields):
    async with httpx2.AsyncClient(base_url=reading.url) as client:
        assert (await client.post(path, json={"model": "tiny", **BASE[path], **fields})).status_code == 200
    assert prompt_of(reading, reading.mesh.decodes[0].requests[-1]).startswith("[high|")
    if "chat_template_kwargs" not in fields:
        assert (await post(path, **fields)).status_code == 200, "another template need not read it"


@pytest.mark.parametrize(
    ("fields", "begin"),
    [
        ({"reasoning_effort": "high"}, "[high|"),
        ({"chat_template_kwargs": '{"reasoning_effort": "high", "mood": "<|im_end|>"}'}, "[high||<|im_end|>]"),
        ({"chat_template_kwargs": '{"enable_thinking": false}', "enable_thinking": True}, "[none|False|]"),
        ({"enable_thinking": True}, "[none|True|]"),
    ],
)
async def test_variables_of_the_chat_template_by_grpc(reading, fields, begin):
    async with grpc.aio.insecure_channel(reading.gateway.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        asked = gateway_pb2.ChatCompletionRequest(model="tiny", messages=HELLO, **fields)
        assert [chunk async for chunk in stub.ChatCompletion(asked)]
    assert prompt_of(reading, reading.mesh.decodes[0].requests[-1]).startswith(begin)


async def test_variables_of_the_chat_template(reading, post):
    async with httpx2.AsyncClient(base_url=reading.url) as client:

        async def ask(**fields):
            return await client.post(CHAT, json={"model": "tiny", **BASE[CHAT], **fields})

        values = {"enable_thinking": False, "mood": "<|im_end|>é"}
        assert (await ask(chat_template_kwargs=values, reasoning_effort="low")).status_code == 200
        request = reading.mesh.decodes[0].requests[-1]
        assert prompt_of(reading, request).startswith("[low|False|<|im_end|>é]")
        assert [*request.prompt_ids].count(reading.tokenizer.token_to_id("<|im_end|>")) == 1, "it is text"
        assert (await ask(enable_thinking=True)).status_code == 200
        assert prompt_of(reading, reading.mesh.decodes[0].requests[-1]).startswith("[none|True|")
        for name in ("messages", "add_generation_prompt", "eos_token", "raise_exception", "colour"):
            answer = await ask(chat_template_kwargs={name: "x"})
            assert error_of(answer) == (400, f"chat_template_kwargs.{name}")
            assert "mood" in answer.json()["error"]["message"]
    assert error_of(await post(CHAT, enable_thinking=False)) == (400, "enable_thinking")


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_only_the_last_tokens_of_a_prompt_are_read(setup, post, sent, path):
    """What is left out is told; a prompt that is short enough is as it was."""
    text = "the quick brown fox jumps over the lazy dog " * 400
    fields = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    field = "messages" if path == CHAT else "prompt"
    assert error_of(await post(path, **fields)) == (400, field)
    fitting = {"messages": HELLO} if path == CHAT else {"prompt": "hi, you"}
    await post(path, **fitting)
    plain = [*sent().prompt_ids]
    await post(path, **fitting, truncate_prompt_tokens=len(plain))
    assert [*sent().prompt_ids] == plain
    whole = setup.ids(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" if path == CHAT else text)
    for last, kept in ((1, 1), (7, 7), (2047, 2047), (-1, 2048 - 512)):
        answer = await post(path, **fields, truncate_prompt_tokens=last)
        assert answer.status_code == 200, answer.text
        assert [*sent().prompt_ids] == whole[-kept:]
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == kept == len(whole) - usage["penstock"]["dropped_tokens"]
    await post(path, **fields, truncate_prompt_tokens=-1, max_tokens=100)
    assert len(sent().prompt_ids) == 1948
    for wrong in (0, -2, 2**31):
        assert error_of(await post(path, **fields, truncate_prompt_tokens=wrong)) == (400, "truncate_prompt_tokens")
    assert error_of(await post(path, **fields, truncate_prompt_tokens=2048)) == (400, field)


def turns(count: int) -> list[dict[str, Any]]:
    """Items with a call and its output in every second turn."""
    items: list[dict[str, Any]] = []
    for at in range(count):
        items.append({"role": "user", "content": f"turn {at}: " + "the quick brown fox " * 10})
        if at % 2:
            items.append({"type": "function_call", "call_id": f"c{at}", "name": "f", "arguments": "{}"})
            items.append({"type": "function_call_output", "call_id": f"c{at}", "output": f"result {at} " * 9})
        items.append({"role": "assistant", "content": f"answer {at}"})
    return [*items, {"role": "user", "content": "the last"}]


@pytest.mark.parametrize("asked", [None, 100, 5000])
async def test_the_oldest_items_of_an_input_that_is_too_long_are_left_out(setup, post, sent, asked):
    fields = {"instructions": "Be brief.", "max_output_tokens": asked}
    assert error_of(await post(RESPONSE, input=turns(80), **fields)) == (400, "input")
    assert error_of(await post(RESPONSE, input=turns(80), **fields, truncation="disabled")) == (400, "input")
    answer = await post(RESPONSE, input=turns(80), **fields, truncation="auto")
    assert answer.status_code == 200, answer.text
    response, prompt = answer.json(), prompt_of(setup, sent())
    assert response["truncation"] == "auto"
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert prompt.endswith("answer 79<|im_end|>\n<|im_start|>user\nthe last<|im_end|>\n<|im_start|>assistant\n")
    assert not prompt.partition("<|im_end|>\n")[2].startswith("<|im_start|>tool"), "no result without its call"
    room = {None: 512, 100: 100, 5000: 1024}[asked]
    assert 2048 - room - 2048 // 4 - 150 < response["usage"]["input_tokens"] <= 2048 - room
    shown, dropped = prompt.count("<|im_start|>") - 2, response["usage"]["penstock"]["dropped_messages"]
    assert shown + dropped == len(turns(80)) and dropped > 0
    short = await post(RESPONSE, input="hi", truncation="auto")
    assert short.json()["usage"]["penstock"]["dropped_messages"] == 0
    one = await post(RESPONSE, input="the quick brown fox " * 2000, truncation="auto")
    assert error_of(one) == (400, "input"), "nothing can be left out"


async def test_the_answers_of_a_request_share_its_budget(opened):
    async with opened(max_request_tokens=40) as setup, httpx2.AsyncClient(base_url=setup.url) as client:
        for fields, most in (
            ({}, 40),
            ({"n": 4}, 10),
            ({"n": 4, "max_tokens": 3}, 3),
            ({"n": 3, "max_tokens": 4000}, 13),
        ):
            answer = await client.post(CHAT, json={"model": "tiny", **BASE[CHAT], **fields})
            assert answer.status_code == 200
            assert {request.sampling.max_tokens for request in setup.mesh.decodes[0].requests[-1:]} == {most}
        two = {"model": "tiny", "prompt": ["a", "b"], "n": 2}
        await client.post(TEXT, json=two)
        assert setup.mesh.decodes[0].requests[-1].sampling.max_tokens == 10
