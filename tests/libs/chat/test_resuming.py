"""A rendering that goes on from an earlier one gives what a whole one gives, whatever the template does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.messages import PLAIN, Call, Message, Rendering, Tool, Variable
from penstock.chat.model import ChatModel, load_chat_model
from penstock.chat.resuming.rendered import Rendered
from penstock.chat.template import ChatTemplate
from penstock.errors import InvalidRequest

from .dialogs import ASKING, EVERY, LOOKING
from .formats.templates import TEMPLATES as FAMILIES
from .tiny import write_model

TEXTS = st.sampled_from(["", "a", " the\n", "<tool_response>x", "<|im_end|>", "x</think>y", "é"])
CALLS = st.builds(
    Call, id=st.just("a1B2c3D4e"), name=st.sampled_from("fg"), arguments=st.sampled_from(['{"a": 1}', "[", "{}"])
)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["user", "user", "assistant", "tool", "system"]),
    content=TEXTS,
    calls=st.lists(CALLS, max_size=2).map(tuple),
    reasoning=st.sampled_from(["", "", "hm"]),
)
TOOL = Tool("f", "does it", {"type": "object", "properties": {"a": {"type": "integer", "default": 1}}})
SAME = replace(TOOL, parameters={"type": "object", "properties": {"a": {"type": "integer", "default": True}}})
"""Equal to TOOL for Python, but not in a prompt."""
VALUES = st.sampled_from([None, True, False, 1, 1.0, "1", "", "<|im_end|>", {"a": 1, "b": [2]}, {"b": [2], "a": 1}])
NAMES = st.sampled_from(["style", "style", "depth", "enable_thinking"])
RENDERINGS = st.builds(
    Rendering,
    generate=st.booleans(),
    continued=st.sampled_from([False, False, False, True]),
    variables=st.dictionaries(NAMES, VALUES, max_size=2).map(
        lambda values: tuple(Variable(name, value, name, wish=True) for name, value in values.items())
    ),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "edit", "cut", "tools"]),
        st.lists(MESSAGES, min_size=1, max_size=4),
        st.one_of(st.none(), st.none(), RENDERINGS),
    ),
    min_size=2,
    max_size=8,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ChatModel:
    return load_chat_model(write_model(tmp_path_factory.mktemp("model")))


def rendered(
    model: ChatModel, messages: list[Message], tools: list[Tool], rendering: Rendering, known: list[Rendered]
) -> Rendered | str:
    """What comes of it, or what is wrong."""
    try:
        return model.rendered(messages, tools, rendering, known)
    except InvalidRequest as error:
        return error.message


def whole(model: ChatModel, messages: list[Message], tools: list[Tool], rendering: Rendering = PLAIN) -> str:
    """The same by the plain template."""
    assert isinstance(model.template, ChatTemplate)
    read = model.template.variables
    values = {each.name: model._foreign.mark(each.value) for each in rendering.variables if each.name in read}
    try:
        if rendering.continued:  # held to what transformers does by test_template
            return model.render(messages, tools, rendering)
        shown = [model._template_message(message) for message in messages]
        offered = [model._foreign.mark(tool.as_json()) for tool in tools]
        return model.template.render(shown, offered, generate=rendering.generate, variables=values)
    except InvalidRequest as error:
        return error.message


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=12)
@given(steps=STEPS)
def test_it_is_the_text_of_a_whole_rendering(model, name, steps):
    model = replace(model, template=ChatTemplate(EVERY[name], {"bos_token": "<s>"}))
    messages, tools, rendering, known = [Message("user", "the fox")], [], PLAIN, []
    for step, more, other in steps:
        rendering = other or replace(rendering, continued=False)
        if step == "add":
            messages = messages + more
        elif step == "edit":
            messages = [*messages[: len(more) - 1], more[0], *messages[len(more) :]]
        elif step == "cut":
            messages = messages[: max(1, len(messages) - len(more))]
        else:
            tools = [[TOOL], [SAME], [], [TOOL]][len(more) - 1]
        got = rendered(model, messages, tools, rendering, known[-3:])
        assert (got.text if isinstance(got, Rendered) else got) == whole(model, messages, tools, rendering)
        known += [got] if isinstance(got, Rendered) else []


def spared(
    model: ChatModel,
    messages: list[Message],
    more: list[Message],
    before: Rendering = PLAIN,
    after: Rendering = PLAIN,
) -> int:
    """Leading messages that are not rendered again when `more` follow."""
    asked = []

    class Counting(ChatTemplate):
        def resume(self, messages, tools, waypoint, **given):
            rest = super().resume(messages, tools, waypoint, **given)
            asked.append(waypoint.at if waypoint is not None and rest is not None else 0)
            return rest

    assert model.template is not None
    model = replace(model, template=Counting(model.template.source, {"bos_token": "<s>"}))
    first = model.rendered(messages, [TOOL], before)
    later = model.rendered([*messages, *more], [TOOL], after, [first])
    assert later.text == whole(model, [*messages, *more], [TOOL], after)
    return asked[-1]


TURN = [Message("user", "the fox"), Message("assistant", "jumps", (Call("a1B2c3D4e", "f", "{}"),))]
RESULT = [Message("tool", "over", call_id="a1B2c3D4e")]
DIALOG = [Message("system", "brief"), *(TURN + RESULT + [Message("assistant", "the dog")]) * 5]


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name != "gemma-tool-code"] + ["own", "state", "taking turns"]
)
def test_old_messages_are_not_rendered_again(model, name):
    model = replace(model, template=ChatTemplate(EVERY[name]))
    assert spared(model, DIALOG, TURN[:1]) == len(DIALOG)


@pytest.mark.parametrize(
    ("name", "messages", "more", "least"),
    [
        ("neighbours", DIALOG, TURN, len(DIALOG)),
        ("neighbours", [*DIALOG, *TURN, *RESULT], TURN, len(DIALOG) + 2),  # the next may be a result too
        ("last question", [*DIALOG, *TURN, *RESULT], TURN[1:], len(DIALOG) + 3),  # in a loop of calls
        ("last question", DIALOG, TURN, 0),  # reasoning before a new question is left out
        ("tools at the last question", DIALOG, TURN, 0),
    ],
)
def test_what_a_template_looks_at_decides_how_much_is_new(model, name, messages, more, least):
    model = replace(model, template=ChatTemplate(LOOKING[name]))
    assert spared(model, messages, more) == least


def styled(value: object, generate: bool = True) -> Rendering:
    return Rendering(generate, variables=(Variable("style", value, "style", wish=True),))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (styled(1), styled(True)),
        (styled(1), styled(1.0)),
        (styled({"a": 1, "b": 2}), styled({"b": 2, "a": 1})),
        (styled("x"), PLAIN),
        (styled("x"), styled("x", generate=False)),
    ],
)
def test_with_other_variables_all_is_rendered_again(model, before, after):
    model = replace(model, template=ChatTemplate(ASKING["in each round"]))
    for one, other in ((before, after), (after, before)):
        assert spared(model, DIALOG, TURN, one, other) == 0
        assert spared(model, DIALOG, TURN, one, one) == len(DIALOG)


def test_none_goes_on_from_a_text_that_an_answer_continues_nor_the_other_way_round(model):
    continued = Rendering(continued=True)
    first = model.rendered(DIALOG, [])
    left_open = model.rendered(DIALOG, [], continued, [first])
    assert left_open.waypoint is None and left_open.text == model.render(DIALOG, [], continued)
    assert left_open.messages == tuple(DIALOG)
    later = model.rendered([*DIALOG, *TURN], [], earlier=[left_open])
    assert later.text == whole(model, [*DIALOG, *TURN], [])


def test_the_time_of_an_old_message_is_not_the_time_now(model):
    model = replace(model, template=ChatTemplate("{% for m in messages %}{{ strftime_now('%f') }}{% endfor %}"))
    assert spared_or_none(model) is None


def test_chance_is_not_repeated(model):
    model = replace(model, template=ChatTemplate("{% for m in messages %}{{ 'abc' | random }}{% endfor %}"))
    assert spared_or_none(model) is None


def spared_or_none(model: ChatModel) -> int | None:
    place = model.rendered(DIALOG, []).waypoint
    return None if place is None or place.at == 0 else place.at


def test_both_renderings_hold_their_messages_once(model):
    first = model.rendered(DIALOG, [])
    later = model.rendered([replace(each) for each in DIALOG] + TURN, [], earlier=[first])
    assert all(one is other for one, other in zip(first.messages, later.messages, strict=False))
