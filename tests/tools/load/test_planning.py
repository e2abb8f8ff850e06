"""What each turn waits for, and what its prompt is made of."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tools.load.support import BLOCK, chain, keys, plan, single

from penstock.bench.router.policies import TRACES
from penstock.load.planning import LoadTurn, Playing, planned
from penstock.traces.reading import RecordedAsk, TraceError, load, load_lengths
from penstock.traces.shaping import shrunk


def turns(*asks: RecordedAsk, **playing: float) -> tuple[LoadTurn, ...]:
    [session] = plan(*asks, **playing).sessions
    return session.turns


def test_a_turn_waits_for_the_one_before_and_thinks_as_long_as_was_recorded() -> None:
    found = turns(*chain("a", (3.0, 2), (5.0, 4), (1.0, 6), think=7.0))
    assert [turn.after for turn in found] == [(), (0,), (1,)]
    assert [turn.think_s for turn in found] == [0.0, 7.0, 7.0]
    assert [turn.number for turn in found] == [1, 2, 3]


def test_where_nobody_says_how_long_an_answer_took_its_length_does() -> None:
    asks = [replace(ask, took=0.0, output=100) for ask in chain("a", (0.0, 2), (0.0, 4), think=5.0)]
    assert turns(*asks)[1].think_s == pytest.approx(3.0), "100 tokens take 2 s of the 5"
    soon = [asks[0], replace(asks[1], at=1.0)]
    assert turns(*soon)[1].think_s == 0.0


def test_the_speed_holds_for_think_times_and_begins_and_think_times_have_a_bound() -> None:
    late = [replace(ask, at=ask.at + 8.0) for ask in chain("b", (1.0, 2), (1.0, 3), think=12.0)]
    found = plan(*chain("a", (1.0, 2), (1.0, 3), think=12.0), *late, speed=4.0, max_think_s=2.5).sessions
    assert [session.at for session in found] == [0.0, 2.0]
    assert [session.turns[1].think_s for session in found] == [2.5, 2.5]


def test_a_rate_replaces_the_times_of_begins_alone() -> None:
    asks = [ask for name in "abcdefgh" for ask in chain(name, (1.0, 2), (1.0, 3))]
    one, two = (plan(*asks, rate=2.0, seed="x").sessions for _ in range(2))
    assert one == two
    begins = [session.at for session in one]
    assert begins == sorted(begins) and begins[0] == 0.0 and begins[-1] > 0
    assert begins != [session.at for session in plan(*asks, rate=2.0, seed="y").sessions]
    assert {session.turns[1].think_s for session in one} == {1.0}


def test_a_prompt_continues_the_one_that_it_has_the_whole_of() -> None:
    first, second, third = turns(*chain("a", (1.0, 3), (1.0, 4), (1.0, 6), output=2))
    assert first.parent == -1 and len(first.blocks) == 3
    assert (second.parent, second.answered, second.new) == (0, True, BLOCK - 2)
    assert (third.parent, third.answered, third.new) == (1, True, 2 * BLOCK - 2)
    assert third.reusable == 4 * BLOCK + 2


def test_siblings_continue_their_parent_and_not_each_other() -> None:
    """As a fan-out: three prompts that each go on from the first one's answer."""
    parent = RecordedAsk(0.0, 8, 2, keys("p0", "p1"), "s", took=1.0)
    children = [
        RecordedAsk(2.0, 12, 2, keys("p0", "p1", f"c{number}"), "s", took=1.0, agent=number) for number in (1, 2, 3)
    ]
    found = turns(parent, *children)
    assert [(turn.parent, turn.answered, turn.after) for turn in found[1:]] == [(0, True, (0,))] * 3


def test_a_prompt_that_left_an_earlier_one_keeps_what_they_share() -> None:
    first, second = chain("a", (1.0, 8), (1.0, 9))
    compacted = replace(second, keys=(*first.keys[:3], *keys("x", "y")), tokens=5 * BLOCK)
    found = turns(first, compacted)[1]
    assert (found.parent, found.kept, found.answered, found.new) == (0, 3 * BLOCK, False, 2 * BLOCK)


def test_the_same_prompt_again_has_no_answer_in_it() -> None:
    first = chain("a", (1.0, 3))[0]
    again = turns(first, replace(first, at=5.0))[1]
    assert (again.parent, again.answered, again.new) == (0, False, 1)


def test_a_sub_agent_begins_after_its_parent_and_the_parent_waits_for_its_end() -> None:
    """The main agent asks at 0 and 20; its sub-agent works from 4 to 15, while a second one runs beyond."""
    common = ("sys",)
    main = [
        RecordedAsk(0.0, 8, 2, keys(*common, "m1"), "s", took=3.0),
        RecordedAsk(20.0, 16, 2, keys(*common, "m1", "m2", "m3"), "s", took=3.0),
    ]
    sub = [
        RecordedAsk(4.0, 8, 2, keys(*common, "t1"), "s", took=2.0, agent=1),
        RecordedAsk(10.0, 12, 2, keys(*common, "t1", "t2"), "s", took=5.0, agent=1),
    ]
    beyond = [
        RecordedAsk(5.0, 8, 2, keys(*common, "u1"), "s", took=2.0, agent=2),
        RecordedAsk(30.0, 12, 2, keys(*common, "u1", "u2"), "s", took=2.0, agent=2),
    ]
    others = [RecordedAsk(1.0, 8, 2, keys(*common, "o"), "other", took=1.0)]
    session, _ = plan(*main, *sub, *beyond, *others).sessions
    found = {(turn.agent, turn.number): (number, turn) for number, turn in enumerate(session.turns)}
    assert found[1, 1][1].after == (found[0, 1][0],) and found[1, 1][1].think_s == 1.0
    assert found[1, 2][1].after == (found[1, 1][0],)
    assert set(found[0, 2][1].after) == {found[0, 1][0], found[1, 2][0]}
    assert found[0, 2][1].think_s == 5.0, "after the sub-agent, which ended last"
    assert found[2, 2][1].after == (found[2, 1][0],)
    assert found[1, 1][1].parent == -1, "it has nothing of its parent but what all sessions begin with"


def test_what_several_sessions_begin_with_is_their_system_prompt() -> None:
    asks = [RecordedAsk(0.0, 13, 2, keys("sys", "tools", f"own{name}"), name, tools=5) for name in ("a", "b")]
    for session in plan(*asks).sessions:
        [turn] = session.turns
        assert (len(turn.system), len(turn.blocks), turn.new, turn.tools) == (2, 1, 1, 5)
    assert [session.turns[0].reusable for session in plan(*asks).sessions] == [0, 2 * BLOCK]


def test_what_does_not_fit_is_left_out_and_counted() -> None:
    """A context of 60 leaves 57 tokens: the third turn of 60 and all after it are cut, the single one is skipped."""
    found = plan(*chain("a", (1.0, 5), (1.0, 10), (1.0, 15), (1.0, 3)), single(0.0, *"ABCDEFGHIJKLMNOP"), context=60)
    assert (found.cut_sessions, found.skipped_requests) == (1, 3)
    assert [len(session.turns) for session in found.sessions] == [2]


def test_the_first_sessions_and_turns_alone() -> None:
    asks = [ask for name in "abc" for ask in chain(name, (1.0, 2), (1.0, 3), (1.0, 4))]
    found = plan(*asks, limit=2, turns=2)
    assert [len(session.turns) for session in found.sessions] == [2, 2]


@pytest.mark.parametrize(("name", "factor"), [("coding_agents", 1), ("coding_agents", 16), ("swe_agents", 4)])
def test_recorded_agents_are_conversations(name: str, factor: int) -> None:
    found = planned(shrunk(load(TRACES / f"{name}.jsonl.gz"), factor), Playing())
    all_turns = [(session, number, turn) for session in found.sessions for number, turn in enumerate(session.turns)]
    assert all(max(turn.after, default=-1) < number and turn.parent < number for _, number, turn in all_turns)
    assert all(turn.think_s >= 0 and turn.new >= 0 and turn.tokens > turn.reusable for _, _, turn in all_turns)
    continued = [turn for _, _, turn in all_turns if turn.answered]
    assert len(continued) > 0.8 * len(all_turns)
    assert len({session.name for session in found.sessions}) == len(found.sessions)
    assert any(turn.tools for _, _, turn in all_turns) == (name == "coding_agents")


def test_recorded_requests_without_sessions_are_sessions_of_one() -> None:
    found = planned(load(TRACES / "conversation.jsonl.gz"), Playing(limit=100))
    assert not found.has_sessions
    assert [len(session.turns) for session in found.sessions] == [1] * 100
    assert not any(session.turns[0].system for session in found.sessions)


def test_a_table_of_lengths(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,110,0\n"
    )
    path = tmp_path / "azure.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    first, second = planned(load_lengths(path), Playing()).sessions
    assert (first.at, second.at) == (0.0, pytest.approx(0.5, abs=1e-3))
    assert (first.turns[0].tokens, first.turns[0].new, first.turns[0].output) == (4808, 4808, 10)
    assert second.turns[0].output == 1
    with pytest.raises(TraceError, match="a table of lengths"):
        load(path)
    path.write_bytes(gzip.compress(b"a,b\n1,2\n"))
    with pytest.raises(TraceError, match="TIMESTAMP, ContextTokens and GeneratedTokens"):
        load_lengths(path)
