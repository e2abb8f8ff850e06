"""Assistant text to events: what is a call, what is content, and that chunk borders never matter."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.chat.events import CallArguments, CallStart, Content, Event, Reasoning
from penstock.chat.formats.hermes import HERMES
from penstock.chat.formats.llama import LLAMA_JSON
from penstock.chat.formats.mistral import MISTRAL
from penstock.chat.formats.parser import AssistantParser


@dataclass
class Parsed:
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, CallStart):
                assert event.index == len(self.calls), "indices count up from 0"
                self.calls.append([event.name, ""])
            elif isinstance(event, CallArguments):
                assert event.index == len(self.calls) - 1, "pieces belong to the call that is open"
                assert event.text
                self.calls[event.index][1] += event.text


class Anything(set[str]):
    """The names of all functions but the empty one."""

    def __contains__(self, name: object) -> bool:
        return name != ""


def parse(*chunks: str, calls: bool = True, think: bool = True, thinking: bool = False) -> Parsed:
    offered = Anything() if calls else None
    parser, parsed = AssistantParser(HERMES, offered=offered, think=think, thinking=thinking), Parsed()
    for chunk in chunks:
        parsed.add(parser.feed(chunk))
    parsed.add(parser.finish())
    return parsed


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


WEATHER = call("get_weather", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("hello <b> world\n", "hello <b> world\n", []),
        (WEATHER, "", [["get_weather", '{"city": "Oslo"}']]),
        ("Let me see.\n" + WEATHER, "Let me see.", [["get_weather", '{"city": "Oslo"}']]),
        ("One.\n\n" + WEATHER, "One.\n", [["get_weather", '{"city": "Oslo"}']]),
        (WEATHER + "\n" + call("f", "{}"), "", [["get_weather", '{"city": "Oslo"}'], ["f", "{}"]]),
        (WEATHER + "\nDone.", "\nDone.", [["get_weather", '{"city": "Oslo"}']]),
        (call("f", '{"a": "}\\"]<tool_call>{"}'), "", [["f", '{"a": "}\\"]<tool_call>{"}']]),
        (call("f", '{"a": "</tool_call>", "b": [{"c": {}}]}'), "", [["f", '{"a": "</tool_call>", "b": [{"c": {}}]}']]),
        ('<tool_call>{"name":"f","arguments":{}}</tool_call>', "", [["f", "{}"]]),
        (call("naïve \\u00e9", "{}"), "", [["naïve é", "{}"]]),
        # No calls: the text stays what it was.
        ("<tool_call>", "<tool_call>", []),
        ("<tool_call>\nnot json\n</tool_call>", "<tool_call>\nnot json\n</tool_call>", []),
        (
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            [],
        ),
        ('<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"name": "", "arguments": {}}', []),
        ('<tool_call>{"name": "f", "arguments": "x"}', '<tool_call>{"name": "f", "arguments": "x"}', []),
        ("a\n<tool_call> <tool_call>\n", "a\n<tool_call> <tool_call>\n", []),
        ("<tool_call><" + WEATHER, "<tool_call><", [["get_weather", '{"city": "Oslo"}']]),
        ("<tool_call>\n" + " " * 400 + WEATHER, "<tool_call>\n" + " " * 400, [["get_weather", '{"city": "Oslo"}']]),
        # Calls that were cut: as generated.
        ('<tool_call>\n{"name": "f", "arguments": {"a": "b', "", [["f", '{"a": "b']]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}', "", [["f", '{"a": 1}']]),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_', "", [["f", "{}"]]),
        ('<tool_call>\n{"name": "f", "argu', '<tool_call>\n{"name": "f", "argu', []),
        # What follows the arguments and does not belong to a call is content.
        ('<tool_call>{"name": "f", "arguments": {}, "x": 1}', ', "x": 1}', [["f", "{}"]]),
    ],
)
def test_calls(text, content, calls):
    parsed = parse(text)
    assert (parsed.content, parsed.calls) == (content, calls)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("<think>a < b</thin</think>yes", "a < b</thin", "yes"),
        ("<think></think>yes", "", "yes"),
        ("\n<think>hm", "hm", ""),
        ("yes <think>no</think>", "", "yes <think>no</think>"),
        ("<thin", "", "<thin"),
        ("<th<think>x", "", "<th<think>x"),
        (" " * 100 + "<think>", "", " " * 100 + "<think>"),
    ],
)
def test_reasoning(text, reasoning, content):
    parsed = parse(text)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    assert parse(text, calls=False).content == content


def test_thinking_opened_by_the_prompt():
    assert parse("hm\n</think>\n\nyes", thinking=True) == Parsed("yes", "hm")
    assert parse("hm", thinking=True) == Parsed("", "hm")


def test_nothing_is_parsed_without_tools():
    text = "<think>x</think> " + WEATHER + "  \n"
    assert parse(text, calls=False, think=False).content == text


def test_calls_inside_reasoning_are_reasoning():
    assert parse("<think>" + WEATHER + "</think>").calls == []


MARKERS = ("<", "<tool_call>", "</tool_call>", "<think>", "</think>", '"name"', '"arguments"')
LETTERS = ("\n", " ", "{", "}", '"', "\\", ":", ",", "[", "]", "é", "🎉", "f", "\t" * 70)
CALLS = (WEATHER, '{"name": "f", "arguments": {', '"name": "f", "arguments": ')
PIECES = st.sampled_from([*MARKERS, *LETTERS, *CALLS])
TEXTS = st.lists(PIECES, max_size=30).map("".join)


@st.composite
def partitioned(draw) -> list[str]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=40)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(partitioned(), st.booleans(), st.booleans())
@example(["\n" * 64, "\n", "<tool_call>"], True, False)
def test_chunks_do_not_matter(chunks, think, thinking):
    text = "".join(chunks)
    whole = parse(text, think=think, thinking=thinking)
    assert parse(*chunks, think=think, thinking=thinking) == whole
    assert parse(*text, think=think, thinking=thinking) == whole


@given(partitioned(), st.booleans(), st.booleans(), st.sampled_from([HERMES, LLAMA_JSON, MISTRAL]))
@example([" a", " b"], True, False, HERMES)
def test_what_passes_is_content_and_changes_nothing(chunks, calls, think, family):
    parser = AssistantParser(family, offered=Anything() if calls else None, think=think)
    for chunk in filter(None, chunks):
        before = {name: value for name, value in vars(parser).items() if name != "_events"}
        passes = parser.passes(chunk)
        events = parser.feed(chunk)
        if passes:
            assert events == [Content(chunk)]
            assert {name: value for name, value in vars(parser).items() if name != "_events"} == before


def test_most_of_a_text_passes():
    parser = AssistantParser(HERMES, offered=["f"], think=True)
    assert not parser.passes(" a"), "it may become reasoning"
    parser.feed("Once")
    assert parser.passes(" upon") and not parser.passes(" a ") and not parser.passes(" <")
    assert AssistantParser(HERMES, offered=None, think=False).passes(" ")


@given(TEXTS)
def test_text_without_a_call_is_unchanged(text):
    parsed = parse(text, think=False)
    if not parsed.calls:
        assert parsed.content == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=3), min_size=1, max_size=3))
def test_arguments_come_back_byte_for_byte(values):
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    parsed = parse("\n".join(call("f", text) for text in texts))
    assert parsed == Parsed("", "", [["f", text] for text in texts])


@pytest.mark.parametrize(
    "worst", ["<", " ", "\n", "<tool_call>", '<tool_call>{"name":"', '{"', "\\", "<tool_call>{", "["]
)
@pytest.mark.parametrize(
    "head", ["", '<tool_call>{"name": "f", "arguments": {"a": "', '<tool_call>{"name": "f", "arguments": [']
)
def test_time_is_linear(worst, head):
    def seconds(length: int) -> float:
        text = head + worst * (length // len(worst))
        begin = time.perf_counter()
        parse(*[text[at : at + 4] for at in range(0, len(text), 4)])
        return time.perf_counter() - begin

    seconds(1000)
    small, large = min(seconds(4_000) for _ in range(3)), seconds(64_000)
    assert large < 16 * small * 6 + 0.05
