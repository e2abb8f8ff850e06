"""The items of a Responses conversation as messages."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chat.messages import Call, Message
from penstock.gateway.api.extension import CacheControl
from penstock.gateway.api.nodes import Nodes
from penstock.gateway.api.responses.bodies import InputItem, InputPart
from penstock.gateway.api.responses.items import Dialogue, sealed


def joined(items: list[InputItem]) -> list[Message]:
    """The naive way: each item is added to the message before it, if it can be."""
    messages: list[Message] = []
    for item in items:
        if item.role == "user":
            messages.append(Message("user", str(item.content)))
            continue
        said = str(item.content) if item.type is None else ""
        why = str(item.summary) if item.type == "reasoning" else ""
        calls = (Call("c", "f", "{}"),) if item.type == "function_call" else ()
        last = messages[-1] if messages else None
        if last is None or last.role != "assistant" or (why and (last.content or last.calls)) or (said and last.calls):
            messages.append(Message("assistant", said, calls, reasoning=why))
        else:
            messages[-1] = Message("assistant", last.content + said, last.calls + calls, reasoning=last.reasoning + why)
    return messages


TEXT = st.sampled_from(["", "a", "bc"])
ITEMS = st.one_of(
    st.builds(lambda text: InputItem(role="user", content=text), TEXT),
    st.builds(lambda text: InputItem(role="assistant", content=text), TEXT),
    st.builds(lambda text: InputItem(type="reasoning", summary=text), TEXT),
    st.just(InputItem(type="function_call", call_id="c", name="f", arguments="{}")),
)


@given(st.lists(ITEMS, max_size=12), st.integers(0, 12))
def test_what_one_said_in_a_turn_is_one_message(items, cut):
    """Also where some of it is from a stored response."""
    dialogue = Dialogue(None, Nodes())
    dialogue.add(items[:cut])
    dialogue.add(items[cut:], "input")
    assert dialogue.messages == joined(items)


def test_a_mark_inside_of_a_turn_knows_the_text_before_it():
    marked = InputPart(type="output_text", text="here", cache_control=CacheControl(type="ephemeral"))
    parts = [InputPart(type="output_text", text="up to "), marked, InputPart(type="output_text", text=" and on")]
    dialogue = Dialogue("Be brief.", Nodes())
    dialogue.add([InputItem(role="assistant", content="Kept "), InputItem(role="assistant", content=parts)], "input")
    [(number, text, place, _)] = dialogue.marks
    assert (number, text, place) == (1, "Kept up to here", "input[1].content[1].cache_control")
    assert dialogue.messages[number].content == "Kept up to here and on"


@pytest.mark.parametrize("kind", ["message", "reasoning"])
def test_the_time_of_many_long_items_is_linear(kind):
    """Sixteen megabytes in one turn, the most that a body has."""

    def seconds(length: int) -> float:
        text = "a" * length
        item = InputItem(role="assistant", content=text)
        if kind == "reasoning":
            item = InputItem(type="reasoning", encrypted_content=sealed(text))
        dialogue = Dialogue(None, Nodes())
        begin = time.perf_counter()
        dialogue.add([item] * 10_000, "input")
        return time.perf_counter() - begin

    small, large = min(seconds(1) for _ in range(3)), seconds(1_600)
    assert large < 16 * small + 0.5
