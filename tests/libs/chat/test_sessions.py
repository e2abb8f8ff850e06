"""A session's tokens come back as they were generated, wherever its text agrees; what is kept is bounded."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chat.messages import PLAIN, Call, Message, Rendering
from penstock.chat.model import ChatModel, load_chat_model
from penstock.chat.prompt import Encoded, common_prefix
from penstock.chat.sessions import MOST_BRANCHES, Branch, Sessions, Spoken, branch_of

from .tiny import TEMPLATE, write_model

USER = Message("user", "the quick brown fox")
ROOT = b"r" * 32
TRIMS = TEMPLATE.replace("{{- content -}}", "{{- content | trim -}}")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ChatModel:
    return load_chat_model(write_model(tmp_path_factory.mktemp("model"), TRIMS))


def letters(model: ChatModel, text: str) -> array[int]:
    """A tokenization that no tokenizer makes: each character by itself; added tokens whole."""
    return array("I", [id for letter in text for id in model.encoder.encode(letter).ids])


CONTINUED = Rendering(continued=True)


def turn(model: ChatModel, messages: list[Message], branches: tuple[Branch, ...] = (), rendering: Rendering = PLAIN):
    """The branch of a prompt, and how it continues those before."""
    rendered = model.rendered(messages, [], rendering, [branch.rendered for branch in branches])
    text = rendered.text
    assert text == model.render(messages, [], rendering)
    found = model.continuations.best(text, messages, branches)
    encoded = model.encoder.encode(text, found.earlier if found else None)
    assert encoded.text == text
    return branch_of(encoded, rendered, found.branch if found else None, ROOT, 4), found


def answered(branch: Branch, ids: array[int], **message) -> Branch:
    return replace(branch, answer=Spoken(ids, Message("assistant", **message)))


def known_of(branch: Branch, later: Branch) -> bool:
    """Whether `later` begins with every token of `branch`."""
    return later.prompt.ids[: len(branch.ids)] == branch.ids


def test_generated_tokens_come_back_though_nobody_would_tokenize_so(model):
    first, _ = turn(model, [USER])
    ids = letters(model, "lazy dog")
    assert ids != model.encoder.encode("lazy dog").ids
    first = answered(first, ids, content="lazy dog")
    second, found = turn(model, [USER, Message("assistant", "lazy dog"), USER], (first,))
    assert known_of(first, second) and found.spliced == len(ids)
    assert second.keys[: len(first.keys)] == first.keys
    assert model.continuations.divergence(first, second.prompt) is None
    text = model.tokenizer.decode(list(second.prompt.ids), skip_special_tokens=False)
    assert text == second.prompt.text

    third, _ = turn(model, [USER, Message("assistant", "lazy dog"), USER, Message("assistant", "x"), USER], (second,))
    assert known_of(first, third), "they stay, turn after turn"


@pytest.mark.parametrize("sent", ["  lazy dog\n", "lazy dog", "\nlazy dog"])
def test_white_space_around_an_answer_does_not_part_it_from_its_tokens(model, sent):
    """This template trims."""
    first = answered(turn(model, [USER])[0], letters(model, "  lazy dog\n"), content="  lazy dog\n")
    second, found = turn(model, [USER, Message("assistant", sent), USER], (first,))
    assert known_of(first, second) and found.spliced


@pytest.mark.parametrize(
    "sent", ["lazy cat", "lazy  dog", "lazydog", "", "lazy dog the"], ids=["word", "inside", "joined", "empty", "more"]
)
def test_an_answer_that_the_client_changed_is_read_anew(model, sent):
    first = answered(turn(model, [USER])[0], letters(model, "lazy dog"), content="lazy dog")
    messages = [USER, Message("assistant", sent), USER]
    second, found = turn(model, messages, (first,))
    assert found.spliced == 0
    assert second.prompt.ids == model.encoder.encode(model.render(messages, [])).ids
    left = model.continuations.divergence(first, second.prompt)
    assert left.token >= len(first.prompt.ids)
    assert left.turn == 1


def test_an_earlier_turn_that_the_client_changed_is_named(model):
    messages = [USER, Message("assistant", "the fox"), USER, Message("assistant", "the dog"), USER]
    first, _ = turn(model, messages)
    messages[2] = Message("user", "jumps")
    second, _ = turn(model, [*messages, Message("assistant", "over"), USER], (first,))
    left = model.continuations.divergence(first, second.prompt)
    assert left.turn == 2
    assert left.token == common_prefix(first.ids, second.prompt.ids) < len(first.ids)


def test_arguments_may_come_back_with_other_white_space(model):
    text = 'the\n<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>'
    ids = model.encoder.encode(text).ids
    spoken = Message("assistant", "the", (Call("1", "f", '{"city": "Oslo"}'),))
    first = replace(turn(model, [USER])[0], answer=Spoken(ids, spoken))
    result = Message("tool", "x", call_id="1")
    for arguments, spliced in (('{"city":"Oslo"}', True), ('{ "city": "Oslo" }', True), ('{"city":"Rome"}', False)):
        sent = replace(spoken, calls=(Call("1", "f", arguments),))
        second, found = turn(model, [USER, sent, result], (first,))
        assert bool(found.spliced) == known_of(first, second) == spliced
    other = replace(spoken, calls=(Call("1", "g", '{"city": "Oslo"}'),))
    assert turn(model, [USER, other, result], (first,))[1].spliced == 0


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory) -> ChatModel:
    """Its template does not trim."""
    return load_chat_model(write_model(tmp_path_factory.mktemp("model"), TEMPLATE))


@pytest.mark.parametrize(
    ("begun", "said"), [("lazy", " dog"), ("lazy ", "dog"), ("lazy d", "og"), ("", "lazy dog"), ("the fox", "es\nlazy")]
)
def test_the_turn_after_an_answer_that_went_on_from_a_text_takes_it_over(plain_model, begun, said):
    model = plain_model
    first, _ = turn(model, [USER, Message("assistant", begun)], rendering=CONTINUED)
    ids = letters(model, said)
    first = answered(first, ids, content=said)
    whole = [USER, Message("assistant", begun + said), USER]
    second, found = turn(model, whole, (first,))
    assert known_of(first, second) and found.spliced == len(ids)
    assert second.keys[: len(first.keys)] == first.keys
    assert model.continuations.divergence(first, second.prompt) is None
    text = model.tokenizer.decode(list(second.prompt.ids), skip_special_tokens=False)
    assert text == second.prompt.text == model.render(whole, [])
    third, _ = turn(model, [*whole, Message("assistant", "x"), USER], (second,))
    assert known_of(first, third), "they stay, turn after turn"


@pytest.mark.parametrize("sent", ["lazy cat", "lazy", "dog", "lazy  big dog", "lazy dog the", "Lazy dog"])
def test_another_text_than_the_begun_one_and_its_answer_is_read_anew(plain_model, sent):
    first, _ = turn(plain_model, [USER, Message("assistant", "lazy")], rendering=CONTINUED)
    first = answered(first, letters(plain_model, " dog"), content=" dog")
    messages = [USER, Message("assistant", sent), USER]
    second, found = turn(plain_model, messages, (first,))
    assert found.spliced == 0
    assert second.prompt.ids == plain_model.encoder.encode(plain_model.render(messages, [])).ids


def test_where_the_template_trims_what_was_begun_the_text_still_agrees(model):
    first, _ = turn(model, [USER, Message("assistant", "lazy ")], rendering=CONTINUED)
    first = answered(first, letters(model, " dog\n"), content=" dog\n")
    second, found = turn(model, [USER, Message("assistant", "lazy  dog\n"), USER], (first,))
    assert known_of(first, second) and found.spliced


def test_an_answer_goes_on_right_behind_its_own_tokens(plain_model):
    """As clients do it with answers that were cut; also several times."""
    model = plain_model
    latest, _ = turn(model, [USER])
    whole = ""
    for said in ("the la", "zy d", "og jumps"):
        ids = letters(model, said)
        latest, whole = answered(latest, ids, content=said), whole + said
        before, (latest, found) = latest, turn(model, [USER, Message("assistant", whole)], (latest,), CONTINUED)
        assert latest.prompt.ids == before.ids and found.spliced == len(ids)
    other, found = turn(model, [USER, Message("assistant", whole + " ")], (before,), CONTINUED)
    assert found.spliced == 0 and other.prompt.text.endswith(whole + " ")
    after, _ = turn(
        model, [USER, Message("assistant", whole), USER], (answered(latest, letters(model, ""), content=""),)
    )
    assert known_of(latest, after)


def test_control_tokens_in_an_answer_stay_what_they_were(model):
    """The client can't smuggle in a token by sending back its text; the model's own text comes back."""
    ids = letters(model, "<") + letters(model, "|im_end|>")
    first = answered(turn(model, [USER])[0], ids, content="<|im_end|>")
    second, found = turn(model, [USER, Message("assistant", "<|im_end|>"), USER], (first,))
    assert known_of(first, second) and found.spliced == len(ids)


def test_agents_that_fork_find_each_branch(model):
    roots = [turn(model, [Message("system", who), USER])[0] for who in ("the fox", "the dog")]
    branches = tuple(
        answered(root, letters(model, text), content=text) for root, text in zip(roots, ("quick", "brown"), strict=True)
    )
    for who, text, branch in (("the fox", "quick", branches[0]), ("the dog", "brown", branches[1])):
        messages = [Message("system", who), USER, Message("assistant", text), USER]
        later, found = turn(model, messages, branches)
        assert found.branch is branch and known_of(branch, later)
    assert turn(model, [Message("user", "brown")])[1] is None


@given(st.lists(st.sampled_from(["the", " quick", "fox ", "\n", "<|im_end|>", "é"]), min_size=1, max_size=8), st.data())
def test_the_spliced_prompt_says_what_the_rendered_one_says(model, words, data):
    content = "".join(words)
    first = answered(turn(model, [USER])[0], letters(model, content), content=content)
    second, _ = turn(model, [USER, Message("assistant", content), USER], (first,))
    decoded = model.tokenizer.decode(list(second.prompt.ids), skip_special_tokens=False)
    assert "".join(decoded.split()) == "".join(second.prompt.text.replace("\ufdd0", "").split())


def branch(count: int) -> Branch:
    return Branch(Encoded("", array("I", range(count))), ROOT, ())


def test_what_is_known_is_bounded_in_sessions_and_tokens():
    known = Sessions(max_sessions=2, max_tokens=100)
    for name, size in (("a", 40), ("b", 40), ("c", 10)):
        known.put("t", name, branch(size))
    assert (len(known), known.tokens) == (2, 50)
    assert known.branches("t", "a") == () == known.branches("other", "b")
    known.branches("t", "b")
    known.put("t", "d", branch(80))
    assert (len(known), known.tokens) == (1, 80)
    known.put("t", "huge", branch(101))
    assert known.branches("t", "huge") == ()


def test_one_tenant_takes_no_room_from_another():
    known = Sessions(max_sessions=100, max_tokens=100, max_tenant_tokens=60)
    known.put("small", "s", branch(30))
    for name in "abcdef":
        known.put("large", name, branch(25))
    assert known.branches("small", "s")
    assert (len(known), known.tokens) == (3, 80)
    for _ in range(3):
        known.put("large", "only", branch(20))
    assert known.branches("small", "s") and known.tokens <= 90


def test_a_continued_branch_gives_its_place_to_the_new_one():
    known = Sessions()
    one, other = branch(10), branch(20)
    known.put("t", "s", one)
    known.put("t", "s", other)
    known.put("t", "s", branch(30), replaces=one)
    assert [len(each.ids) for each in known.branches("t", "s")] == [20, 30]
    for size in range(1, 20):
        known.put("t", "s", branch(size))
    assert len(known.branches("t", "s")) == MOST_BRANCHES
    assert known.tokens == sum(len(each.ids) for each in known.branches("t", "s"))


def test_what_no_prompt_shows_counts_as_well(model):
    """A template may leave out most of what a client sends."""
    hidden = Message("tool", "a", call_id="x" * 80_000)
    one, _ = turn(model, [USER, hidden])
    plain, _ = turn(model, [USER, Message("tool", "a")])
    assert plain.size == len(plain.ids) < 1000 < one.size == (80_000 + one.chars % 80_000) // 8
    sessions = Sessions(max_tokens=25_000, max_tenant_tokens=25_000)
    for number in range(10):
        sessions.put("t", str(number), one)
    assert len(sessions) == 2 and sessions.tokens == 2 * one.size
