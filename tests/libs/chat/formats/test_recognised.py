"""A model's family is known by its chat template, and the calls that the template shows are read."""

from __future__ import annotations

import json

import pytest
from transformers.utils.chat_parsing.response_parser import parse_response

from penstock.chat.formats.families import FAMILIES, FORMATS, NO_CALLS, recognise
from penstock.chat.model import load_chat_model
from penstock.chat.sandbox import generated_arguments
from penstock.chat.template import ChatTemplate

from ..tiny import TEMPLATE, write_model
from .reading import parse
from .templates import OTHERS, TEMPLATES

EACH = pytest.mark.parametrize("name", list(TEMPLATES))
OSLO = '{"city": "Oslo", "days": 3}'


def shown(name: str, *calls: tuple[str, str]) -> str:
    """An assistant message with these calls, as its template renders it."""
    family = FORMATS[name]
    made = [
        {
            "id": family.call_id(function, str(number), bytes(12)),
            "type": "function",
            "function": {"name": function, "arguments": generated_arguments(arguments)},
        }
        for number, (function, arguments) in enumerate(calls)
    ]
    return ChatTemplate(TEMPLATES[name]).render([{"role": "assistant", "content": "", "tool_calls": made}], None)


def test_every_family_has_a_template():
    assert set(TEMPLATES) == {family.name for family in FAMILIES}


@EACH
def test_recognised_by_its_template(name):
    assert recognise(TEMPLATES[name]).name == name


def test_the_embedded_model_writes_hermes_calls():
    assert recognise(TEMPLATE).name == "hermes"


@pytest.mark.parametrize("name", list(OTHERS))
def test_others_have_no_calls(name):
    assert recognise(OTHERS[name]) is NO_CALLS
    assert parse(NO_CALLS, "<tool_call> [f()]").content == "<tool_call> [f()]"


@EACH
def test_what_its_template_shows_is_read(name):
    calls = [("get_weather", OSLO), ("f", "{}")][: 1 if FORMATS[name].written.between is None else 2]
    family, text = FORMATS[name], shown(name, *calls)
    begins = (found.start() for found in family.openings.finditer(text))
    read = next(parsed.calls for at in begins if (parsed := parse(family, text[at:])).calls)
    assert [(function, json.loads(arguments)) for function, arguments in read] == [
        (function, json.loads(arguments)) for function, arguments in calls
    ]


@EACH
def test_the_format_can_be_forced(name, tmp_path):
    model = load_chat_model(write_model(tmp_path), name)
    assert model.family.name == name
    assert load_chat_model(write_model(tmp_path)).family.name == "hermes"


TRANSFORMERS = {
    "hermes": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
                "transform": "{content}",
            },
            "content": {},
        },
    },
    "gemma": {
        "start_anchor": "<|turn>model\n",
        "fields": {
            "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": {"name": "{name}", "arguments": "{content}"},
            },
            "content": {},
        },
    },
}  # fmt: skip
TEXTS = {
    "hermes": "<think>\nhm\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "gemma": "<|channel>thought\nhm<channel|>Let me see."
    '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|><|tool_call>call:f{}<tool_call|>',
}


@pytest.mark.parametrize("name", list(TRANSFORMERS))
def test_the_same_as_transformers(name):
    """The response templates are those that transformers uses for these families when a tokenizer brings none."""
    text = TEXTS[name]
    theirs = parse_response(text, TRANSFORMERS[name], prefix=TRANSFORMERS[name]["start_anchor"])
    ours = parse(FORMATS[name], text)
    assert ours.reasoning == theirs["reasoning_content"]
    assert ours.content == theirs["content"]
    calls = [{"name": function, "arguments": json.loads(arguments)} for function, arguments in ours.calls]
    assert calls == theirs["tool_calls"]
