"""The chat template: the same bytes as the generator's renderer, append-only, and at ease with any schema."""

from __future__ import annotations

import json
from random import Random

import pytest
from transformers import AutoTokenizer

from penstock.models import NAMES, embedded, json_tasks
from penstock.models import agent as agents
from penstock.models.render import render, unmarked
from penstock.models.turns import documents, turns
from penstock.models.words import Side


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded("penstock-mini"))


def rendered(tokenizer, messages, tools=None, **options):
    return tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **options)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city"},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                    "days": {"type": "integer"},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "ping"}},
    {
        "type": "function",
        "function": {
            "name": "nested",
            "parameters": {
                "type": "object",
                "properties": {
                    "items": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
                    "maybe": {"type": ["string", "null"]},
                    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                    "level": {"enum": [1, 2, 3]},
                    "fixed": {"const": "a"},
                    "ref": {"$ref": "#/$defs/x"},
                    "anything": True,
                    "free": {"type": "object"},
                    "bare": {"type": "array"},
                },
            },
        },
    },
]

SESSION = [
    {"role": "system", "content": "You are Ada."},
    {"role": "user", "content": "Weather in Århus and Oslo?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Århus"}'}},
            {"id": "2", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": '{"temperature": 4}'},
    {"role": "tool", "tool_call_id": "2", "content": '{"temperature": -1}'},
    {"role": "assistant", "content": "It is 4 degrees in Århus and -1 in Oslo. "},
    {"role": "user", "content": "And the rest?"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [{"id": "3", "type": "function", "function": {"name": "ping", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "3", "content": "pong"},
    {"role": "assistant", "content": "Pong."},
]


def test_a_schema_is_shown_as_the_call_to_write(tokenizer):
    text = rendered(tokenizer, SESSION[:2], TOOLS)
    assert (
        '\nGet the weather.\n{"name": "get_weather", "arguments": {"city": "string (The city)", '
        '"unit": "optional celsius | fahrenheit", "days": optional integer}}\n'
    ) in text
    assert '{"name": "ping", "arguments": {}}' in text
    assert '"items": [{"x": optional number}], "maybe": optional string | null' in text


@pytest.mark.parametrize("tools", [TOOLS, []])
@pytest.mark.parametrize("skip", [0, 1])
def test_the_template_and_the_renderer_agree(tokenizer, tools, skip):
    assert rendered(tokenizer, SESSION[skip:], tools) == render(SESSION[skip:], tools).text


def test_the_template_and_the_renderer_agree_on_generated_sessions(tokenizer, monkeypatch):
    seen = []
    for module in (agents, json_tasks):
        monkeypatch.setattr(module, "render", lambda m, t, kind="": seen.append((m, t)) or render(m, t, kind))
    side = Side(True)
    for i in range(80):
        agents.agent(Random(i), side, 3, 4, 5, sentences=2)
        json_tasks.json_task(Random(i), side)
    assert len(seen) == 160 and any(message.get("retold") for messages, _ in seen for message in messages)
    for messages, tools in seen:
        plain = [m | {"content": unmarked(m["content"])} if m.get("content") else m for m in messages]
        assert rendered(tokenizer, plain, list(tools)) == render(messages, tools).text


def test_what_a_client_asks_of_a_held_out_turn_renders_as_what_stands_before_it(tokenizer):
    """Also where the client has written the calls its own way."""
    retold = 0
    for doc in documents(("L3", "everyday", "json", "facts"), 8, 1):
        retold += any(message.get("retold") for message in doc.messages)
        for turn in turns(doc):
            prompt = rendered(tokenizer, turn.messages, list(turn.tools), add_generation_prompt=True)
            assert prompt == doc.text[: turn.begin]
    assert retold


def test_each_turn_only_appends(tokenizer):
    for tools in (TOOLS, []):
        for k in range(1, len(SESSION)):
            assert rendered(tokenizer, SESSION[: k + 1], tools).startswith(rendered(tokenizer, SESSION[:k], tools))


def test_what_the_model_writes_is_what_the_next_turn_renders(tokenizer):
    for k, message in enumerate(SESSION):
        if message["role"] != "assistant":
            continue
        calls = [
            f'<tool_call>\n{{"name": "{f["name"]}", "arguments": {f["arguments"]}}}\n</tool_call>'
            for f in (c["function"] for c in message.get("tool_calls", ()))
        ]
        written = "\n".join(([message["content"]] if message["content"] else []) + calls)
        prompt = rendered(tokenizer, SESSION[:k], TOOLS, add_generation_prompt=True)
        assert prompt + written + "<|im_end|>\n" == rendered(tokenizer, SESSION[: k + 1], TOOLS)


def test_arguments_as_an_object_render_as_the_string_does(tokenizer):
    loose = json.loads(json.dumps(SESSION))
    for message in loose:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert rendered(tokenizer, loose, TOOLS) == rendered(tokenizer, SESSION, TOOLS)


def test_content_parts_are_joined(tokenizer):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert rendered(tokenizer, parts) == "<|im_start|>user\nab<|im_end|>\n"


def test_the_markers_are_single_tokens_shared_by_both_models(tokenizer):
    markers = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    calls = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    for marker in markers + calls:
        assert len(tokenizer.encode(marker, add_special_tokens=False)) == 1
    assert tokenizer.eos_token == "<|im_end|>"
    texts = [(embedded(name) / "tokenizer.json").read_bytes() for name in NAMES]
    assert texts[0] == texts[1]


def test_a_word_has_the_same_tokens_everywhere(tokenizer):
    word = tokenizer.encode("zimblecrax", add_special_tokens=False)
    for context in ('"zimblecrax"', " zimblecrax.", "get_zimblecrax(", "\nzimblecrax:"):
        ids = tokenizer.encode(context, add_special_tokens=False)
        assert any(ids[i : i + len(word)] == word for i in range(len(ids)))


def test_any_text_survives_a_round_trip(tokenizer):
    text = 'Ünïcode 日本語 🙂\t"x": {"y": [1, 2]}\r\n  end '
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
