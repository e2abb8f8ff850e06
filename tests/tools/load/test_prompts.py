"""The text of prompts: the same for the same blocks, as long as planned, and conversations as agents have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.tools.load.support import BLOCK, WORDING, chain, keys, plan, single

from penstock.load.conversation import SessionPrompts
from penstock.load.events import AnswerText
from penstock.load.planning import LoadSession
from penstock.load.tokens import TokenPrompts
from penstock.load.wording import WORDS, Wording
from penstock.traces.reading import RecordedAsk


def prompts(session: LoadSession, *, tools: bool = False) -> SessionPrompts:
    return SessionPrompts(session, WORDING, tools=tools)


def text(session: LoadSession, number: int = 0) -> str:
    return " ".join(message["content"] for message in prompts(session).messages(number))


def talk_of_tokens(session: LoadSession, vocab: int = 900) -> TokenPrompts:
    return TokenPrompts(session, Wording(salt="test", vocab=vocab))


def test_prompts_of_token_ids_are_exactly_as_long_as_planned() -> None:
    """And blocks with the same key are the same ids, as their text would be."""
    one, two, alone = (
        talk_of_tokens(session).ids(0)
        for session in plan(single(0, *"abcd"), single(1, *"abxy"), single(2, *"pqrs")).sessions
    )
    assert [len(ids) for ids in (one, two, alone)] == [4 * BLOCK] * 3
    assert one[: 2 * BLOCK] == two[: 2 * BLOCK] and one[2 * BLOCK :] != two[2 * BLOCK :]
    assert one[:BLOCK] != alone[:BLOCK] and all(300 <= id < 900 for id in (*one, *two, *alone))
    [session] = plan(single(0, *"abcd")).sessions
    assert max(talk_of_tokens(session, 400).ids(0)) < 400
    assert TokenPrompts(session, Wording(salt="other", vocab=900)).ids(0) != one


def test_a_turn_of_token_ids_has_the_answer_that_came_and_another_where_none_did() -> None:
    [session] = plan(*chain("a", (1.0, 4), (1.0, 6), (1.0, 8), output=2)).sessions
    talk = talk_of_tokens(session)
    first = talk.ids(0)
    talk.answered(0, AnswerText(ids=(7, 8)))
    second = talk.ids(1)
    assert second[: len(first) + 2] == [*first, 7, 8] and len(second) == 6 * BLOCK
    talk.answered(1, None)
    third = talk.ids(2)
    assert third[: len(second)] == second and len(third) == 8 * BLOCK


def test_every_byte_has_a_word() -> None:
    assert len(WORDS) == len(set(WORDS)) == 256


def test_equal_blocks_are_equal_text_and_others_are_not() -> None:
    """As Mooncake's hash_ids: two prompts that share two blocks of four share the text of these and no more."""
    one, two, alone = plan(single(0, *"abcd"), single(1, *"abxy"), single(2, *"pqrs")).sessions
    first, second, third = text(one).split(), text(two).split(), text(alone).split()
    shared = 2 * BLOCK // 2
    assert first[:shared] == second[:shared]
    assert first[shared:] != second[shared:] and first[:shared] != third[:shared]
    assert len(first) == len(second) == 4 * BLOCK // 2


def test_another_salt_is_another_text() -> None:
    [session] = plan(single(0, *"abcd")).sessions
    other = SessionPrompts(session, replace_salt(WORDING, "other"), tools=False).messages(0)
    assert other != prompts(session).messages(0)


def replace_salt(wording: Wording, salt: str) -> Wording:
    return Wording(salt=salt, words_per_token=wording.words_per_token, tool_tokens=wording.tool_tokens)


@pytest.mark.parametrize("per_token", [0.15, 0.62, 0.77, 1.0])
def test_many_blocks_are_as_long_as_they_should_be(per_token: float) -> None:
    """However few words a block has; and a block has the same words wherever its prompt goes on."""
    wording = Wording(salt="s", words_per_token=per_token)
    seeds = [f"{number}" for number in range(100)]
    words = wording.blocks(seeds, 16)
    assert len(words) == pytest.approx(1600 * per_token, abs=1)
    assert wording.blocks(seeds[:60], 16) == words[: len(wording.blocks(seeds[:60], 16))]
    assert wording.blocks(seeds[60:], 16, first=60) == words[len(wording.blocks(seeds[:60], 16)) :]


def test_tools_take_the_tokens_that_they_should_and_more_of_them_begin_with_the_fewer() -> None:
    for tokens in (30, 400, 5000):
        tools = WORDING.tools(tokens)
        words = sum(len(tool["function"]["description"].split()) for tool in tools)
        assert len(tools) * 20 + words * 2 == pytest.approx(tokens, abs=22)
    assert WORDING.tools(5000)[:1] == WORDING.tools(400)[:1]
    assert len({tool["function"]["name"] for tool in WORDING.tools(5000)}) == len(WORDING.tools(5000))
    assert Wording(salt="s").tools(400) == []


def test_a_conversation_has_the_answers_that_came() -> None:
    [session] = plan(*chain("a", (1.0, 4), (1.0, 6), (1.0, 8), output=2)).sessions
    talk = prompts(session)
    first = talk.messages(0)
    talk.answered(0, AnswerText("what the server said"))
    second = talk.messages(1)
    assert second[: len(first)] == first
    assert second[len(first)] == {"role": "assistant", "content": "what the server said"}
    assert [message["role"] for message in second[len(first) + 1 :]] == ["user"]
    assert len(second[-1]["content"].split()) == (2 * BLOCK - 2) // 2
    talk.answered(1, None)
    third = talk.messages(2)
    assert third[: len(second)] == second
    assert len(third[len(second)]["content"].split()) == 1, "a text of two tokens, in place of an answer that failed"


def test_tools_that_were_called_give_their_results() -> None:
    [session] = plan(*chain("a", (1.0, 4), (1.0, 8), output=2)).sessions
    talk = prompts(session)
    talk.messages(0)
    calls = [{"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "xy"]
    talk.answered(0, AnswerText("", calls))
    *_, said, one, two = talk.messages(1)
    assert said["tool_calls"] == calls
    assert [(result["role"], result["tool_call_id"]) for result in (one, two)] == [
        ("tool", "call_x"),
        ("tool", "call_y"),
    ]
    assert len(one["content"].split()) == (4 * BLOCK - 2) // 2


def test_a_compacted_conversation_keeps_the_text_that_it_shares() -> None:
    first, second = chain("a", (1.0, 8), (1.0, 9))
    compacted = replace(second, keys=(*first.keys[:3], *keys("x", "y")), tokens=5 * BLOCK)
    [session] = plan(first, compacted).sessions
    talk = prompts(session)
    before = talk.messages(0)[0]["content"].split()
    talk.answered(0, AnswerText("said"))
    [only] = talk.messages(1)
    words = only["content"].split()
    kept = 3 * BLOCK // 2
    assert words[:kept] == before[:kept] and words[kept:] != before[kept : len(words)]
    assert len(words) == 5 * BLOCK // 2


def test_users_never_speak_twice() -> None:
    """Some chat templates want user and assistant in turns."""
    first = chain("a", (9.0, 4))[0]
    beside = replace(first, at=1.0, tokens=6 * BLOCK, keys=(*first.keys, *keys("x", "y")), took=1.0)
    [session] = plan(first, beside).sessions
    talk = prompts(session)
    talk.messages(0)
    assert [message["role"] for message in talk.messages(1)] == ["user"]
    assert talk.messages(1)[0]["content"].startswith(talk.messages(0)[0]["content"])


def test_tools_go_as_tools_or_are_text_of_the_system_prompt() -> None:
    asks = [RecordedAsk(0.0, 240, 2, keys(*(f"{n}" for n in range(50)), name), name, tools=120) for name in ("a", "b")]
    session = plan(*asks).sessions[0]
    with_tools, without = prompts(session, tools=True), prompts(session)
    assert [len(message["content"].split()) for message in without.messages(0)] == [100, 20]
    assert [len(message["content"].split()) for message in with_tools.messages(0)] == [40, 20]
    assert without.tools(0) == [] and len(with_tools.tools(0)) == 1
    assert with_tools.messages(0)[1] == without.messages(0)[1]
