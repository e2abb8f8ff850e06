"""Chat completions through the official client: whole and streamed, tools, several turns, usage."""

from __future__ import annotations

import json

import pytest
from openai import AsyncOpenAI, BadRequestError

from penstock.gateway.completing.timing import BEFORE_FIRST, PARTS, TIMES
from penstock.kv.identity import KEY_BYTES

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
OTHER_TOOLS = [{"type": "function", "function": {"name": "fly", "parameters": {"type": "object"}}}]
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "fly"}}]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Tromsø"}}\n</tool_call>'


class Folded:
    """A stream, put together as a client would; checks its grammar on the way."""

    def __init__(self) -> None:
        self.choices: dict[int, dict] = {}
        self.usage = None

    def add(self, chunk) -> None:
        assert self.usage is None, "the usage comes last"
        if not chunk.choices:
            self.usage = chunk.usage
        for choice in chunk.choices:
            first = choice.index not in self.choices
            fresh = {"content": "", "reasoning": "", "calls": [], "finish": None, "logprobs": []}
            found = self.choices.setdefault(choice.index, fresh)
            assert found["finish"] is None, "nothing follows a finish reason"
            assert (choice.delta.role == "assistant") == first, "the role comes once, first"
            found["content"] += choice.delta.content or ""
            found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            found["finish"] = choice.finish_reason
            found["logprobs"] += (choice.logprobs.content or []) if choice.logprobs else []
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.index == len(found["calls"]) and call.type == "function" and call.function.name
                    found["calls"].append([call.function.name, ""])
                else:
                    assert call.function.name is None, "the name comes once"
                found["calls"][call.index][1] += call.function.arguments


async def whole(client: AsyncOpenAI, **body):
    answer = await client.chat.completions.create(model="tiny", **{"messages": HELLO, **body})
    folded = Folded()
    folded.usage = answer.usage
    for choice in answer.choices:
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
        folded.choices[choice.index] = {
            "content": choice.message.content or "",
            "reasoning": getattr(choice.message, "reasoning_content", None) or "",
            "calls": calls,
            "finish": choice.finish_reason,
            "logprobs": (choice.logprobs.content or []) if choice.logprobs else [],
        }
    return folded


async def streamed(client: AsyncOpenAI, **body):
    folded = Folded()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await client.chat.completions.create(model="tiny", **{"messages": HELLO, **options, **body}):
        folded.add(chunk)
    return folded


async def both(client: AsyncOpenAI, **body) -> Folded:
    """The answer, after it was the same both ways."""
    first, second = await whole(client, **body), await streamed(client, **body)
    assert first.choices == second.choices
    assert without_times(first.usage) == without_times(second.usage)
    return second


def without_times(usage) -> dict:
    """Usage that does not depend on what was asked before."""
    found = usage.model_dump()
    assert found["penstock"].pop("session").keys() == {"known_tokens", "spliced_tokens", "diverged_at"}
    for told_at_the_end in ("drafted_tokens", "accepted_tokens", "drafts"):  # a stop string may end it before
        found["penstock"].pop(told_at_the_end)
    assert found["penstock"].pop("seed") >= 0
    assert all(seconds >= 0 for seconds in found["penstock"].pop("times").values())
    return found


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls", "finish"),
    [
        ("The quick brown fox.", "The quick brown fox.", "", [], "stop"),
        ("", "", "", [], "stop"),
        (CALL, "", "", [["get_weather", '{"city":  "Tromsø"}']], "tool_calls"),
        ("Wait.\n" + CALL + "\n" + CALL, "Wait.", "", [["get_weather", '{"city":  "Tromsø"}']] * 2, "tool_calls"),
        ("<think>\nhm\n</think>\n\nyes 🎉", "yes 🎉", "hm", [], "stop"),
        ("<tool_call>\nnonsense", "<tool_call>\nnonsense", "", [], "stop"),
    ],
)
@pytest.mark.parametrize("batch", [1, 3, 100])
async def test_stream_and_whole_agree(setup, text, content, reasoning, calls, finish, batch):
    setup.says(text)
    setup.script.batch = batch
    folded = await both(setup.client, tools=TOOLS)
    expected = {"content": content, "reasoning": reasoning, "calls": calls, "finish": finish, "logprobs": []}
    assert folded.choices == {0: expected}
    assert folded.usage.completion_tokens == len(setup.ids(text)) + 1


async def test_special_tokens_have_no_text(setup):
    ids = [*setup.ids("a"), setup.tokenizer.token_to_id("<|im_start|>"), *setup.ids("b")]
    setup.script.say = lambda request: ids
    assert (await both(setup.client)).choices[0]["content"] == "ab"


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS, "tool_choice": "none"}], ids=["no tools", "none"])
async def test_nothing_is_parsed_unless_tools_may_be_called(setup, options):
    setup.says(CALL)
    choice = (await both(setup.client, **options)).choices[0]
    assert (choice["content"], choice["calls"], choice["finish"]) == (CALL, [], "stop")


async def test_a_call_cut_by_max_tokens_is_not_repaired(setup):
    setup.says(CALL)
    for most in range(1, len(setup.ids(CALL)) + 1):
        choice = (await both(setup.client, tools=TOOLS, max_tokens=most)).choices[0]
        assert choice["finish"] == "length"
        if choice["calls"]:
            assert '{"city":  "Tromsø"}'.startswith(choice["calls"][0][1].rstrip("\ufffd"))
        else:
            assert CALL.startswith(choice["content"].rstrip("\ufffd"))


async def test_what_the_model_wrote_is_what_the_next_turn_shows_it(setup):
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    history = b""
    for text in ("Let me look.\n" + CALL + "\n" + CALL, "It is clear.\n", CALL):
        setup.says(text)
        answer = await setup.client.chat.completions.create(
            model="tiny", messages=messages, tools=TOOLS, extra_headers={"x-session-affinity": "s"}
        )
        request = setup.mesh.prefills[0].requests[-1]
        prompt = setup.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
        assert prompt.encode().startswith(history)
        history = (prompt + text).encode()
        message = answer.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        for call in message.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "clear"}'})
        messages.append({"role": "user", "content": "And now?"})
    asks = setup.mesh.router.asks
    assert asks[2].block_keys.startswith(asks[1].block_keys[:-KEY_BYTES]) and asks[1].block_keys
    assert len({ask.session for ask in asks}) == 1 and asks[0].session


async def test_content_parts_and_developer_messages(setup):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await whole(setup.client, messages=[{"role": "developer", "content": "D"}, {"role": "user", "content": parts}])
    prompt = setup.tokenizer.decode(list(setup.mesh.prefills[0].requests[-1].prompt_ids), skip_special_tokens=False)
    assert prompt == "<|im_start|>system\nD<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"


async def test_choices_differ_by_seed(setup):
    setup.script.say = lambda request: setup.ids(f"seed {request.sampling.seed}")
    folded = await both(setup.client, n=3, seed=41)
    assert [folded.choices[number]["content"] for number in range(3)] == ["seed 41", "seed 42", "seed 43"]
    first = (await whole(setup.client)).choices[0]["content"]
    assert first != (await whole(setup.client)).choices[0]["content"], "an absent seed is drawn"


async def test_negative_seeds_wrap(setup):
    setup.script.say = lambda request: setup.ids(f"{request.sampling.seed}")
    assert (await whole(setup.client, seed=-1, n=2)).choices[1]["content"] == "0"


async def test_logprobs(setup):
    setup.says("fox 🎉")
    choice = (await both(setup.client, logprobs=True, top_logprobs=2)).choices[0]
    assert bytes(byte for entry in choice["logprobs"] for byte in entry.bytes).decode() == "fox 🎉<|im_end|>"
    assert [entry.logprob for entry in choice["logprobs"]] == [
        -0.25 * (at + 1) for at in range(len(setup.ids("fox 🎉")) + 1)
    ]
    assert all(len(entry.top_logprobs) == 2 for entry in choice["logprobs"])
    assert not (await both(setup.client)).choices[0]["logprobs"]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("The quick brown fox.", {"stop": "brown"}),
        ("The quick brown fox.", {"stop": [" quick", "zzz"], "n": 2}),
        ("<think>hm hm</think>yes", {}),
        ("<think>hm hm</think>yes", {"stop": "hm"}),
        ("Wait." + CALL, {"tools": TOOLS}),
        ("Wait." + CALL, {"tools": TOOLS, "stop": "Trom"}),
        ("Wait." + CALL, {"tools": TOOLS, "max_tokens": 9}),
        ("fox 🎉 x", {"max_tokens": 3}),
    ],
)
async def test_logprobs_of_every_counted_token(setup, text, options, batch):
    setup.says(text)
    setup.script.batch = batch
    found = await both(setup.client, logprobs=True, top_logprobs=1, **options)
    assert sum(len(choice["logprobs"]) for choice in found.choices.values()) == found.usage.completion_tokens > 0


@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 3, 100])
async def test_usage_is_exact(setup, prefill, n, max_tokens):
    setup.script.prefill = prefill
    setup.script.cached = {"host": 8, "nvme": 4}
    usage = (await both(setup.client, n=n, max_tokens=max_tokens)).usage
    own = usage.model_dump()["penstock"]
    length = min(len(setup.ids("The quick brown fox.")) + 1, max_tokens)
    assert usage.completion_tokens == n * length
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens == len(setup.mesh.decodes[0].requests[-1].prompt_ids)
    assert usage.prompt_tokens_details.cached_tokens == 12
    assert own["cached_tokens"] == {"worker": 0, "gpu": 0, "host": 8, "nvme": 4, "remote": 0}
    assert own["computed_tokens"] == usage.prompt_tokens - 12
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens, details.reasoning_tokens) == (
        0,
        0,
        0,
    )
    if length > 1 or not prefill:
        assert (own["drafted_tokens"], own["accepted_tokens"]) == (8 * n, 3 * n)
        assert own["drafts"] == {
            "passes": n,
            "verified": {"grammar": 0, "lookup": 0, "model": 8 * n, "head": 0},
            "accepted": {"grammar": 0, "lookup": 0, "model": 3 * n, "head": 0},
            "verified_at": [n] * 8,
            "accepted_at": [n] * 3 + [0] * 5,
            "waited_s": 0.0,
        }
    times = own["times"]
    assert tuple(times) == TIMES
    assert sum(times[part] for part in PARTS) == pytest.approx(times["total"], abs=1e-5)
    assert sum(times[part] for part in BEFORE_FIRST) == pytest.approx(times["first_token"], abs=1e-5)


async def test_fresh_prompts_report_zeros(setup):
    usage = (await both(setup.client)).usage
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.model_dump()["penstock"]["cached_tokens"] == {"worker": 0, "gpu": 0, "host": 0, "nvme": 0, "remote": 0}


async def test_reasoning_is_counted(setup):
    setup.says("<think>hm hm</think>yes")
    usage = (await both(setup.client)).usage
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


async def test_without_include_usage_a_stream_has_none(setup):
    chunks = [
        chunk async for chunk in await setup.client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    ]
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stop", ["brown", "own f", ["x.", "zzz"], ["fox", " brown fox"], "."])
@pytest.mark.parametrize("batch", [1, 2, 50])
async def test_stop_strings(setup, stop, batch):
    text = "The quick brown fox. And more text that nobody shall see or pay for."
    setup.says(text)
    setup.script.batch = batch
    options = {"stop": stop, "logprobs": True}
    first, second = await whole(setup.client, **options), await streamed(setup.client, **options)
    assert first.choices == second.choices
    end, shown = min((text.find(one) + len(one), text.find(one)) for one in stops(stop) if one in text)
    choice = first.choices[0]
    assert (choice["content"], choice["finish"]) == (text[:shown], "stop")
    ids = setup.ids(text)
    counted = next(n for n in range(len(ids) + 1) if len(setup.tokenizer.decode(ids[:n])) >= end)
    assert first.usage.completion_tokens == second.usage.completion_tokens == counted
    assert len(choice["logprobs"]) == counted
    await setup.mesh.until(lambda: setup.mesh.live == 0)


def stops(stop: str | list[str]) -> list[str]:
    return [stop] if isinstance(stop, str) else stop


async def test_a_stop_string_that_never_completes_is_shown(setup):
    setup.says("The quick bro")
    assert (await both(setup.client, stop="brown")).choices[0]["content"] == "The quick bro"


async def test_a_stop_string_inside_a_call(setup):
    setup.says(CALL)
    arguments = '{"city":  "Tromsø"}'
    for stop in ("Trom", "{", "name", "\n", "<tool"):
        choice = (await both(setup.client, tools=TOOLS, stop=stop, logprobs=True)).choices[0]
        assert (choice["calls"], choice["finish"]) == ([["get_weather", arguments]], "tool_calls")
        assert len(choice["logprobs"]) == len(setup.ids(CALL)) + 1


async def test_a_stop_string_beside_a_call(setup):
    setup.says(f"<think>\nabcd</think>Wait.{CALL}.abcd")
    folded = await both(setup.client, tools=TOOLS, stop=["cde", ".<", ".ab"], logprobs=True)
    choice = folded.choices[0]
    assert (choice["reasoning"], choice["content"], choice["finish"]) == ("abcd", "Wait.", "tool_calls")
    assert len(choice["calls"]) == 1
    assert len(choice["logprobs"]) == folded.usage.completion_tokens
    setup.says(f"<think>\nabcd</think>Wait.{CALL}")
    choice = (await both(setup.client, tools=TOOLS, stop="bc", logprobs=True)).choices[0]
    assert (choice["reasoning"], choice["content"], choice["calls"], choice["finish"]) == ("a", "", [], "stop")


async def test_a_call_of_a_function_that_was_not_offered_is_content(setup):
    setup.says(CALL)
    for options in ({"tools": OTHER_TOOLS}, {"tools": TOOLS + OTHER_TOOLS, "tool_choice": ALLOWED}):
        choice = (await both(setup.client, **options)).choices[0]
        assert (choice["content"], choice["calls"], choice["finish"]) == (CALL, [], "stop")


@pytest.mark.parametrize("choice", ["auto", {"type": "auto"}, "none"])
async def test_a_choice_without_tools_means_nothing(setup, choice):
    setup.says("The quick brown fox.")
    assert (await both(setup.client, extra_body={"tool_choice": choice})).choices[0][
        "content"
    ] == "The quick brown fox."


async def test_stop_tokens_have_no_text(setup):
    ids = setup.ids("The quick brown")
    setup.script.say = lambda request: ids
    setup.script.eos = ids[-1]
    choice = (await both(setup.client, extra_body={"stop_token_ids": [ids[-1]]})).choices[0]
    assert choice["content"] == setup.tokenizer.decode(ids[:-1])


async def test_where_no_call_may_come_its_token_is_banned(setup):
    """Otherwise a grammar says what may come."""
    marker = setup.tokenizer.token_to_id("<tool_call>")
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        await whole(setup.client, **options)
        sampling = setup.mesh.prefills[0].requests[-1].sampling
        assert (list(sampling.banned_token_ids), sampling.grammar) == ([marker], "")
    await whole(setup.client, tools=TOOLS)
    sampling = setup.mesh.prefills[0].requests[-1].sampling
    assert not sampling.banned_token_ids
    assert "get_weather" in sampling.grammar and f"<[{marker}]>" in sampling.grammar


async def test_a_schema_that_cannot_be_followed(setup):
    """It is an error for a strict tool; another tool's arguments are any object then."""
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}, "b": {"enum": ["Tromsø"]}}}
    odd = {"name": "odd", "parameters": schema}
    tools = [*TOOLS, {"type": "function", "function": odd}]
    await whole(setup.client, tools=tools)
    grammar = setup.mesh.prefills[0].requests[-1].sampling.grammar
    assert "odd" in grammar and "enum" not in grammar
    tools[1] = {"type": "function", "function": {**odd, "strict": True}}
    with pytest.raises(BadRequestError) as error:
        await whole(setup.client, tools=tools)
    assert error.value.param == "tools[1].function.parameters.properties.a.not"


async def test_every_sampling_field_arrives(setup):
    body = {"top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True}
    await whole(
        setup.client,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.75,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"5": -100, "6": 2.5},
        seed=3,
        logprobs=True,
        top_logprobs=4,
        user="somebody",
        extra_body={**body, "stop_token_ids": [11]},
    )
    sampling = setup.mesh.decodes[0].requests[-1].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.top_k) == (9, 2, 0.5, 7)
    assert (sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (0.75, 0.125, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.seed) == (0.25, -0.5, 3)
    assert dict(sampling.logit_bias) == {5: -100, 6: 2.5}
    assert list(sampling.banned_token_ids) == [setup.tokenizer.token_to_id("<tool_call>")]

    assert (sampling.logprobs, list(sampling.stop_token_ids), sampling.ignore_eos) == (4, [11], True)
    await whole(setup.client)
    sampling = setup.mesh.decodes[0].requests[-1].sampling
    prompt = setup.mesh.decodes[0].requests[-1].prompt_ids
    assert sampling.max_tokens == 2048 - len(prompt)
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1, 1, 1)
    assert not sampling.HasField("logprobs")


async def test_raw_events(setup):
    import httpx2

    body = {"model": "tiny", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    async with httpx2.AsyncClient() as client:
        answer = await client.post(f"{setup.url}/v1/chat/completions", json=body, headers={"x-request-id": "abc-1"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"] == "abc-1"
    events = [event for event in answer.text.split("\n\n") if not event.startswith(":")]
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert sum(choice["finish_reason"] is not None for chunk in chunks for choice in chunk["choices"]) == 1


async def test_the_other_choices_wait_until_the_prompt_is_stored(setup):
    setup.script.cached = {"host": 4}
    await whole(setup.client, n=3)
    first = setup.mesh.prefills[0].requests[0].request_id
    assert first.endswith(".0")
    asks = [request.request_id for request in setup.mesh.prefills[0].requests]
    assert asks[0] == first and len(set(asks)) == 3


async def test_clients_without_a_session_key_are_remembered_too(setup):
    memory = setup.gateway.reception.models.first.sessions
    messages = [{"role": "system", "content": "You are X."}, *HELLO]
    before = len(memory)
    await whole(setup.client, messages=messages)
    await whole(setup.client, messages=[*messages, {"role": "assistant", "content": "a"}, *HELLO])
    assert len(memory) == before + 1
    assert setup.mesh.router.asks[0].session == ""
