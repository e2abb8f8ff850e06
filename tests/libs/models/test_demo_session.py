"""The scripted session: well formed, and its tools are pure."""

from __future__ import annotations

import json

from penstock.models.demo_session import FUNCTIONS, SYSTEM, TOOLS, TURNS, answer


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
