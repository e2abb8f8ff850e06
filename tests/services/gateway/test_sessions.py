"""The next turn's prompt begins with the last one's tokens and with those of its answer, as they were generated."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from penstock.kv.bounds import keys_of

HELLO = [{"role": "user", "content": "hello"}]
MORE = {"role": "user", "content": "more"}


def letter_by_letter(setup, text: str) -> list[int]:
    """Tokens that no tokenizer makes of this text."""
    ids = [id for letter in text for id in setup.ids(letter)]
    assert ids != setup.ids(text)
    return ids


async def ask(setup, messages, session="s", **body):
    """An answer, and the prompt that decode got for it."""
    answer = await setup.client.chat.completions.create(
        model="tiny", messages=messages, extra_headers={"x-session-affinity": session}, **body
    )
    return answer, list(setup.mesh.decodes[0].requests[-1].prompt_ids)


def session_of(answer) -> dict:
    return answer.usage.penstock["session"]


@pytest.mark.parametrize("stream", [False, True])
async def test_generated_tokens_are_found_again(setup, stream):
    ids = letter_by_letter(setup, "the quick fox")
    setup.script.say = lambda request: ids
    session = f"exact {stream}"
    if stream:
        chunks = await setup.client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, extra_headers={"x-session-affinity": session}
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
        first = list(setup.mesh.decodes[0].requests[-1].prompt_ids)
    else:
        answer, first = await ask(setup, HELLO, session)
        text = answer.choices[0].message.content
        assert session_of(answer) == {"known_tokens": 0, "spliced_tokens": 0, "diverged_at": None}
    assert text == "the quick fox"
    answer, second = await ask(setup, [*HELLO, {"role": "assistant", "content": text}, MORE], session)
    assert second[: len(first) + len(ids)] == first + ids
    assert session_of(answer) == {
        "known_tokens": len(first) + len(ids),
        "spliced_tokens": len(ids),
        "diverged_at": None,
    }


async def test_the_router_gets_the_new_keys_alone_and_all_when_it_knows_none(setup):
    setup.says("the quick fox")
    router, session = setup.mesh.router, "keys"
    router.brought.clear()
    messages = [*HELLO, MORE, MORE]
    for turn in range(3):
        if turn == 2:
            router.chains.clear()  # as after a restart
        await ask(setup, messages, session)
        messages += [{"role": "assistant", "content": "the quick fox"}, MORE]
    first, second, third = (keys_of("ask", asked.block_keys) for asked in router.asks[-3:])
    assert second[: len(first)] == first and third[: len(second)] == second
    assert router.brought == [len(first), len(second) - len(first), len(third) - len(second), len(third)]


async def test_where_a_session_was_left_is_said(setup):
    metrics = setup.gateway.metrics
    before = metrics.diverged._value.get()
    answer, first = await ask(setup, HELLO, "left")
    changed = {"role": "assistant", "content": "Something else."}
    answer, _ = await ask(setup, [*HELLO, changed, MORE], "left")
    left = session_of(answer)["diverged_at"]
    assert left["turn"] == 1 and len(first) <= left["token"] < session_of(answer)["known_tokens"]
    assert metrics.diverged._value.get() == before + 1


async def test_agents_that_fork_at_once_each_go_on_from_their_own_answer(setup):
    """Two branches with one session key, in turns and side by side."""
    texts = {"fox": letter_by_letter(setup, "the quick fox"), "dog": letter_by_letter(setup, "lazy dog brown")}
    setup.script.say = lambda request: (
        texts["fox"] if set(setup.ids("Alpha")) <= set(request.prompt_ids) else texts["dog"]
    )
    starts = {
        "fox": [{"role": "system", "content": "Alpha"}, *HELLO],
        "dog": [{"role": "system", "content": "Omega"}, *HELLO],
    }
    answers = await asyncio.gather(*(ask(setup, messages, "forks") for messages in starts.values()))
    for name, (answer, _) in zip(starts, answers, strict=True):
        said = answer.choices[0].message.content
        later, _ = await ask(setup, [*starts[name], {"role": "assistant", "content": said}, MORE], "forks")
        assert session_of(later)["spliced_tokens"] == len(texts[name])


async def test_each_choice_is_a_branch(setup):
    seeds = {}

    def say(request):
        return seeds.setdefault(request.sampling.seed, letter_by_letter(setup, f"the fox {len(seeds)}"))

    setup.script.say = say
    answer, prompt = await ask(setup, HELLO, "choices", n=3, seed=7)
    for choice in answer.choices:
        text = choice.message.content
        setup.script.say = lambda request: setup.ids("end")
        later, ids = await ask(setup, [*HELLO, {"role": "assistant", "content": text}, MORE], "choices")
        expected = seeds[7 + choice.index]
        assert ids[len(prompt) : len(prompt) + len(expected)] == expected
        assert session_of(later)["spliced_tokens"] == len(expected)


async def test_an_answer_that_a_stop_string_cut_is_read_anew(setup):
    ids = letter_by_letter(setup, "the quick fox")
    setup.script.say = lambda request: ids
    answer, _ = await ask(setup, HELLO, "stopped", stop=["fox"])
    assert answer.choices[0].message.content == "the quick "
    said = {"role": "assistant", "content": "the quick "}
    later, _ = await ask(setup, [*HELLO, said, MORE], "stopped")
    assert session_of(later)["spliced_tokens"] == 0 and session_of(later)["diverged_at"] is None


@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_the_turn_after_a_continued_answer_takes_it_over(setup, api):
    ids = letter_by_letter(setup, "quick fox")
    setup.script.say = lambda request: ids
    begun, session = [*HELLO, {"role": "assistant", "content": "the lazy "}], f"continued {api}"
    if api == "chat":
        answer, first = await ask(setup, begun, session, extra_body={"continue_final_message": True})
        said = answer.choices[0].message.content
    else:
        async with httpx2.AsyncClient(base_url=setup.url, headers={"x-session-affinity": session}) as client:
            body = {"model": "tiny", "max_tokens": 50, "messages": begun}
            said = (await client.post("/v1/messages", json=body)).json()["content"][0]["text"]
        first = list(setup.mesh.decodes[0].requests[-1].prompt_ids)
    whole = {"role": "assistant", "content": "the lazy " + said}
    later, second = await ask(setup, [*HELLO, whole, MORE], session)
    assert second[: len(first) + len(ids)] == first + ids
    known = {"known_tokens": len(first) + len(ids), "spliced_tokens": len(ids), "diverged_at": None}
    assert session_of(later) == known


async def test_an_answer_that_was_cut_goes_on_behind_its_own_tokens(setup):
    ids = letter_by_letter(setup, "the quick fox")
    setup.script.say = lambda request: ids
    answer, first = await ask(setup, HELLO, "cut", max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    begun = [*HELLO, {"role": "assistant", "content": answer.choices[0].message.content}]
    later, second = await ask(setup, begun, "cut", extra_body={"continue_final_message": True})
    assert second == first + ids[:5] and session_of(later)["spliced_tokens"] == 5


async def test_raw_text_has_no_session(setup):
    answer = await setup.client.completions.create(model="tiny", prompt="the fox")
    assert answer.usage.penstock["session"] is None
