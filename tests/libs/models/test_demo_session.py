"""The scripted session: well formed, and its tools are pure."""

from __future__ import annotations

import json

from penstock.models import embedded
from penstock.models.demo_session import FUNCTIONS, SYSTEM, TOOLS, TURNS, answer
from penstock.models.export import load
from penstock.models.generate import generate
from penstock.models.render import render
from penstock.models.turns import calls_in


def test_every_tool_has_a_function_that_takes_its_parameters():
    assert [t["function"]["name"] for t in TOOLS] == list(FUNCTIONS)
    for tool in TOOLS:
        arguments = dict.fromkeys(tool["function"]["parameters"]["properties"], "x")
        first, again = (answer(tool["function"]["name"], json.dumps(arguments)) for _ in range(2))
        assert first == again and json.loads(first)


def test_bad_calls_are_answered_with_an_error():
    for name, arguments in (("nope", "{}"), ("get_weather", "{"), ("get_weather", '{"town": "x"}')):
        assert "error" in json.loads(answer(name, arguments))


def test_the_session_has_the_size_of_an_agents():
    assert 4 <= len(TURNS) <= 8 and 4 <= len(TOOLS) <= 6 and len(SYSTEM) > 1000


def test_the_embedded_model_plays_its_beginning():
    net, tokenizer = load(embedded("penstock-mini"))
    messages = [{"role": "system", "content": SYSTEM}]

    def reply() -> str:
        prompt = tokenizer.encode(render(messages, TOOLS).text + "<|im_start|>assistant\n").ids
        text = tokenizer.decode(generate(net, prompt, 60), skip_special_tokens=False)
        return text.removesuffix("<|im_end|>")

    for turn, city, degrees in ((TURNS[0], "Bergen", "7"), (TURNS[1], "Lisbon", "19")):
        messages.append({"role": "user", "content": turn})
        assert calls_in(reply()) == [("get_weather", json.dumps({"city": city}))]
        function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        messages.append({"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]})
        result = answer("get_weather", function["arguments"])
        messages.append({"role": "tool", "tool_call_id": "1", "content": result})
        said = reply()
        assert degrees in said and city in said
        messages.append({"role": "assistant", "content": said})
