"""The embedded model's text side, as it ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.chat.events import CallArguments, CallStart
from penstock.chat.messages import Call, Message, Tool
from penstock.chat.model import load_chat_model

MODEL = Path(__file__).parents[3] / "libs/penstock/models/penstock-mini"
pytestmark = pytest.mark.skipif(not (MODEL / "tokenizer.json").is_file(), reason="the embedded model is not built yet")
TOOL = Tool("get_weather", "Current weather", {"type": "object", "properties": {"city": {"type": "string"}}})
ARGUMENTS = '{"city": "Tromsø", "n": [1, 2.50, null]}'


@pytest.fixture(scope="module")
def model():
    return load_chat_model(MODEL)


def test_turns_only_append(model):
    messages, earlier, text = [Message("system", "Be brief."), Message("user", "Weather?")], None, ""
    for turn in (
        [Message("assistant", "", (Call("1", "get_weather", ARGUMENTS),)), Message("tool", "4 C", call_id="1")],
        [Message("assistant", "It is 4 C."), Message("user", "And in Bodø?")],
        [Message("assistant", "Wait.", (Call("2", "get_weather", "{}"), Call("3", "get_weather", ARGUMENTS)))],
    ):
        rendered = model.render(messages, [TOOL])
        encoded = model.encoder.encode(rendered, earlier)
        assert rendered.startswith(text)
        assert encoded == model.encoder.encode(rendered)
        assert list(encoded.ids) == model.tokenizer.encode(rendered, add_special_tokens=False).ids
        messages, earlier, text = [*messages, *turn], encoded, rendered


def test_what_it_writes_is_read_and_comes_back_the_same(model):
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    stream = model.text_stream()
    parser = model.parser(thinking=False, offered=("get_weather",))
    events = []
    for token in model.tokenizer.encode(call, add_special_tokens=False).ids:
        events += parser.feed(stream.feed(token))
    events += parser.finish()
    name = next(event.name for event in events if isinstance(event, CallStart))
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert (name, arguments) == ("get_weather", ARGUMENTS)
    shown = model.render([Message("user", "x"), Message("assistant", "", (Call("1", name, arguments),))], [TOOL])
    assert call in shown


def test_its_end_of_turn_ends_an_answer(model):
    assert model.eos_ids == {model.tokenizer.token_to_id("<|im_end|>")}
    assert model.silent >= model.eos_ids
