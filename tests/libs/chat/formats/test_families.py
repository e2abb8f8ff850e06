"""Every family: its calls and reasoning are read, whatever the chunks, and nothing else is taken for a call."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chat.formats.families import FAMILIES, FORMATS

from .reading import Parsed, parse

OSLO = '{"city": "Oslo", "days": 3}'
CALLS = [["get_weather", OSLO], ["f", "{}"]]
_WRITTEN = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": OSLO}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "mistral-list": '[TOOL_CALLS] [{"name": "get_weather", "arguments": OSLO, "id": "a1B2c3D4e"}, '
    '{"name": "f", "arguments": {}}]',
    "mistral": "[TOOL_CALLS]get_weather[ARGS]OSLO[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}",
    "llama-json": '{"name": "get_weather", "parameters": OSLO}; {"type": "function", "name": "f", "parameters": {}}',
    "llama-pythonic": "[get_weather(city='Oslo', days=3), f()]",
    "gemma": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|><|tool_call>call:f{}<tool_call|>',
    "gemma-tool-code": '```tool_code\nget_weather(city="Oslo", days=3)\nf()\n```',
    "phi": '<|tool_call|>[{"name": "get_weather", "arguments": OSLO}, {"name": "f", "arguments": {}}]<|/tool_call|>',
    "deepseek-r1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\nOSLO\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>OSLO<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>OSLO"
    "<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
}
WRITTEN = {name: text.replace("OSLO", OSLO) for name, text in _WRITTEN.items()}
EACH = pytest.mark.parametrize("name", list(WRITTEN))


def partitions(text: str) -> st.SearchStrategy[list[str]]:
    def cut(cuts: set[int]) -> list[str]:
        marks = [0, *sorted(cuts), len(text)]
        return [text[a:b] for a, b in pairwise(marks)]

    return st.sets(st.integers(0, len(text)), max_size=30).map(cut)


def test_every_family_is_here():
    assert set(WRITTEN) == {family.name for family in FAMILIES}


@EACH
def test_two_calls(name):
    parsed = parse(FORMATS[name], WRITTEN[name])
    assert (parsed.calls, parsed.content, parsed.called) == (CALLS, "", True)


@EACH
def test_content_and_reasoning_come_first(name):
    family = FORMATS[name]
    text = f"{family.reasoning.open}hm\n{family.reasoning.close}\n\n"
    parsed = parse(family, text + ("" if family.leads else "Let me see.\n") + WRITTEN[name])
    assert (parsed.reasoning, parsed.calls) == ("hm", CALLS)
    assert parsed.content == ("" if family.leads else "Let me see.")
    assert parse(family, text[len(family.reasoning.open) :], thinking=True).reasoning == "hm"


@EACH
def test_functions_that_were_not_offered_are_no_calls(name):
    family, text = FORMATS[name], WRITTEN[name]
    assert parse(family, text, offered=("g",)) == Parsed(text)
    assert parse(family, text, offered=None) == Parsed(text)
    only = parse(family, text, offered=("get_weather",))
    assert only.calls == CALLS[:1]
    assert only.content


@EACH
@given(data=st.data())
def test_chunks_do_not_matter(name, data):
    family = FORMATS[name]
    pieces = [*WRITTEN[name], *re.split(r"(\W)", WRITTEN[name]), family.reasoning.open, WRITTEN[name], "\n", "\\", "'"]
    text = data.draw(st.lists(st.sampled_from(pieces), max_size=20).map("".join))
    whole = parse(family, text)
    assert parse(family, *text) == whole
    assert parse(family, *data.draw(partitions(text))) == whole


@EACH
def test_cut_anywhere_the_call_is_not_complete(name):
    family, text = FORMATS[name], WRITTEN[name]
    for end in range(len(text)):
        parsed = parse(family, text[:end])
        for called, whole in zip(parsed.calls, CALLS, strict=False):
            assert whole[1].startswith(called[1]), "never repaired"
        if parsed.called:
            assert all(called[1] == whole[1] for called, whole in zip(parsed.calls, CALLS, strict=False))


@EACH
def test_time_is_linear(name):
    family, text = FORMATS[name], WRITTEN[name]
    worst = [text[:at] for at in (1, 12, len(text) // 3)] + ["\n", "\\", '"', "'", "[", "{", "(", "["]

    def seconds(piece: str, length: int) -> float:
        repeated = text[: len(text) // 4] + piece * (length // len(piece))
        begin = time.perf_counter()
        parse(family, *[repeated[at : at + 4] for at in range(0, len(repeated), 4)])
        return time.perf_counter() - begin

    for piece in worst:
        seconds(piece, 500)
        small, large = (min(seconds(piece, length) for _ in range(3)) for length in (1_000, 16_000))
        assert large < 16 * small * 6 + 0.05, piece


@pytest.mark.parametrize("name", ["llama-json", "llama-pythonic"])
@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", 'see {"name": "f", "parameters": {}}', "a [f()]", "[g()]", "["])
def test_llama_calls_only_where_an_answer_begins(name, text):
    assert parse(FORMATS[name], text) == Parsed(text)


DRAWN = bytes(range(1, 13))
"""What tells a call's id from those of others."""


def test_ids_that_templates_want():
    mistral = FORMATS["mistral"]
    assert parse(mistral, WRITTEN["mistral"]).given == ["", "a1B2c3D4e"]
    assert mistral.call_id("f", "a1B2c3D4e", DRAWN) == "a1B2c3D4e"
    assert re.fullmatch("[a-zA-Z0-9]{9}", mistral.call_id("f", "", DRAWN))
    assert mistral.call_id("f", "", DRAWN) != mistral.call_id("f", "", bytes(12))
    kimi = FORMATS["kimi"]
    assert [kimi.call_id("f", given, DRAWN) for given in parse(kimi, WRITTEN["kimi"]).given] == [
        "functions.f:0",
        "functions.f:1",
    ]
    assert FORMATS["hermes"].call_id("f", "", DRAWN) == f"call_{DRAWN.hex()}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True)


@given(st.dictionaries(KEYS, JSON, max_size=4), st.booleans())
def test_python_values_become_json(arguments, as_json):
    written = ", ".join(f"{key}={json.dumps(value) if as_json else repr(value)}" for key, value in arguments.items())
    for name in ("llama-pythonic", "gemma-tool-code"):
        head, tail = ("[f(", ")]") if name == "llama-pythonic" else ("```tool_code\nf(", ")\n```")
        [[_, text]] = parse(FORMATS[name], head + written + tail).calls
        assert json.loads(text) == arguments


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"'it\'s'", "it's"), (r'"a\"b"', 'a"b'), (r"'\x41\u00e9\U0001f389'", "Aé🎉"), (r"'\d'", "\\d"), ("'\n'", "\n"),
        ("(1, 2)", [1, 2]), ("{'a': {}}", {"a": {}}), ("-1.5e3", -1500.0), ("true", True), ('"\\ud83c\\udf89"', "🎉"),
    ],
)  # fmt: skip
def test_python_literals(written, value):
    [[_, text]] = parse(FORMATS["llama-pythonic"], f"[f(x={written})]").calls
    assert json.loads(text) == {"x": value}


def gemma(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


PLAIN_TEXT = st.text(max_size=8).filter(lambda text: "<|" not in text and not text.endswith("<"))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | PLAIN_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, PLAIN, max_size=4))
def test_gemma_values_become_json(arguments):
    [[_, text]] = parse(FORMATS["gemma"], f"<|tool_call>call:f{gemma(arguments)}<tool_call|>").calls
    assert json.loads(text) == arguments


def test_half_a_pair_stays_an_escape():
    """It is no text, and no client could be told of it."""
    for written in ("\\U0000d800", "\\ud800"):
        [[_, text]] = parse(FORMATS["llama-pythonic"], f'[f(x="{written}")]').calls
        assert text == '{"x": "\\ud800"}'
