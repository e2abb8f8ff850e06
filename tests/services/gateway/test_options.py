"""Every combination of the options that shape an answer: usage and the reason of the end are there, and a stream folds
into the whole answer."""

from __future__ import annotations

import itertools

import pytest

HELLO = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "note", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TEXT = 'It is noted.\n<tool_call>\n{"name": "note", "arguments": {"a": 1}}\n</tool_call>'
JSON = '{"a": 1}'
SWITCHES = ("include_usage", "logprobs", "several", "tools", "json", "cut", "stop")
OPTIONS = [
    dict(zip(SWITCHES, values, strict=True)) for values in itertools.product((False, True), repeat=len(SWITCHES))
]


def body(switches: dict[str, bool]) -> dict:
    asked: dict = {"model": "tiny", "messages": HELLO, "seed": 1}
    if switches["logprobs"]:
        asked |= {"logprobs": True, "top_logprobs": 2}
    if switches["several"]:
        asked["n"] = 2
    if switches["tools"]:
        asked["tools"] = [{"type": "function", "function": FUNCTION}]
    if switches["json"]:
        asked["response_format"] = {"type": "json_object"}
    if switches["cut"]:
        asked["max_tokens"] = 7
    if switches["stop"]:
        asked["stop"] = [" noted", "1}"]
    return asked


def folded(chunks: list) -> tuple[dict[int, dict], object]:
    """A stream's choices, put together, and its usage."""
    choices: dict[int, dict] = {}
    usage = None
    for chunk in chunks:
        assert usage is None, "nothing follows the usage"
        usage = chunk.usage
        assert bool(chunk.choices) != bool(usage)
        for choice in chunk.choices:
            found = choices.setdefault(choice.index, {"content": "", "calls": [], "logprobs": [], "finish": []})
            found["content"] += choice.delta.content or ""
            found["logprobs"] += choice.logprobs.content or [] if choice.logprobs else []
            found["finish"] += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                if call.id:
                    found["calls"].append(["", ""])
                found["calls"][call.index][0] += call.function.name or ""
                found["calls"][call.index][1] += call.function.arguments or ""
    return choices, usage


def counted(usage) -> dict:
    found = usage.model_dump()
    for name in ("times", "session"):
        found["penstock"].pop(name, None)
    return found


@pytest.mark.parametrize(
    "switches", OPTIONS, ids=lambda switches: "-".join(name for name in switches if switches[name])
)
async def test_a_stream_is_the_whole_and_nothing_is_left_out(setup, switches):
    setup.says(JSON if switches["json"] and not switches["tools"] else TEXT)
    asked = body(switches)
    answer = await setup.client.chat.completions.create(**asked)
    options = {"stream_options": {"include_usage": True}} if switches["include_usage"] else {}
    chunks = [chunk async for chunk in await setup.client.chat.completions.create(**asked, stream=True, **options)]
    choices, usage = folded(chunks)
    assert len(answer.choices) == len(choices) == (2 if switches["several"] else 1)
    for choice in answer.choices:
        found = choices[choice.index]
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
        logprobs = choice.logprobs.content if choice.logprobs else []
        assert found == {
            "content": choice.message.content or "",
            "calls": calls,
            "logprobs": logprobs,
            "finish": [choice.finish_reason],
        }
        assert bool(logprobs) == switches["logprobs"]
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert (usage is not None) == switches["include_usage"]
    if usage is not None:
        assert counted(usage) == counted(answer.usage)
    if switches["logprobs"]:
        assert sum(len(found["logprobs"]) for found in choices.values()) == answer.usage.completion_tokens
