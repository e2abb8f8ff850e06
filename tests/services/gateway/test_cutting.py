"""A conversation that is too long loses its oldest messages in bites: what is kept begins alike for many turns."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.chat.messages import Call, Message
from penstock.chat.model import ChatModel, load_chat_model
from penstock.errors import InvalidRequest
from penstock.gateway.completing.cutting import shortened
from penstock.gateway.request.ask import Conversation

CONTEXT = 1000
MOST = 800
SYSTEM = Message("system", "Be brief.")
TEXTS = {
    "words": "the quick brown fox jumps over the lazy dog",
    "digits": "0123456789 98765 43210",
    "other letters": "不好的狐狸",
}


@pytest.fixture(scope="module")
def model(model_dir) -> ChatModel:
    return load_chat_model(model_dir)


def grown(text: str, seed: int = 1) -> list[list[Message]]:
    """A conversation at each of its turns; every third one calls a tool."""
    source, messages, turns = random.Random(seed), [SYSTEM], []
    for turn in range(40):
        messages.append(Message("user", f"{turn}: " + text * source.randint(1, 3)))
        turns.append([*messages])
        if turn % 3 == 0:
            messages.append(Message("assistant", calls=(Call(str(turn), "f", '{"a": 1}'),)))
            messages.append(Message("tool", text, call_id=str(turn)))
        messages.append(Message("assistant", f"{turn}: {text}"))
    return turns


def tokens_of(model: ChatModel, messages) -> list[int]:
    return list(model.encoder.encode(model.render(messages, [])).ids)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_turns_that_follow_share_what_is_kept(model, text):
    begins, least = [], CONTEXT
    for messages in grown(text):
        if len(tokens_of(model, messages)) <= MOST:
            continue
        kept, dropped = shortened(model, Conversation(messages), MOST, CONTEXT)
        assert list(kept.messages) == [SYSTEM, *messages[1 + dropped :]]
        assert kept.messages[1].role != "tool"
        ids = tokens_of(model, kept.messages)
        assert len(ids) <= MOST
        least = min(least, len(ids))
        begins.append(dropped)
    assert begins == sorted(begins) and len(begins) > 15
    assert len({*begins}) * 2 < len(begins), "a bite lasts for more than two turns"
    assert least > MOST - CONTEXT // 4 - 250, "and is no larger than that, but for a message"


def test_two_following_turns_begin_with_the_same_tokens(model):
    long = [turn for turn in grown(TEXTS["words"]) if len(tokens_of(model, turn)) > MOST]
    prompts = [tokens_of(model, shortened(model, Conversation(turn), MOST, CONTEXT)[0].messages) for turn in long]
    opening = len(tokens_of(model, long[0][:2])) + 5
    shared = sum(one[: len(one) - 5] == other[: len(one) - 5] for one, other in pairwise(prompts))
    assert opening < min(map(len, prompts)) and shared * 2 > len(prompts)


def test_what_a_bite_is_depends_on_nothing_that_comes_later(model):
    """Neither on how long the answer may be, as far as its room does not ask for another bite."""
    messages = grown(TEXTS["words"])[-1]
    cuts = [shortened(model, Conversation(messages), most, CONTEXT)[1] for most in range(300, 900, 10)]
    assert cuts == sorted(cuts, reverse=True) and len({*cuts}) < 6


def test_where_no_bite_helps_as_few_go_as_it_takes(model):
    """The first messages are short, so the first bite ends behind a long one that has to stay."""
    long = Message("user", TEXTS["words"] * 16)
    messages = [*[Message("user", "hi"), Message("assistant", "hello")] * 3, long]
    size = len(tokens_of(model, [long]))
    kept, dropped = shortened(model, Conversation(messages), size + 20, CONTEXT)
    assert 0 < dropped < 6 and kept.messages[-1] == long
    assert shortened(model, Conversation([long, long]), 10, CONTEXT) == (Conversation([long, long]), 0)


def test_a_template_that_wants_a_users_message_first(model):
    turns = grown(TEXTS["words"])
    template = model.template

    class Wanting:
        variables = template.variables

        def resume(self, messages, tools, waypoint, **options):
            first = next(
                message for message in messages if not isinstance(message, str) and message["role"] != "system"
            )
            if first["role"] != "user":
                raise InvalidRequest("messages: the first one must be of the user")
            return template.resume(messages, tools, waypoint, **options)

    begins = set()
    for messages in turns[-10:]:
        kept, dropped = shortened(replace(model, template=Wanting()), Conversation(messages), MOST, CONTEXT)
        assert kept.messages[1].role == "user" and len(tokens_of(model, kept.messages)) <= MOST
        begins.add(dropped)
    assert len(begins) < 5
