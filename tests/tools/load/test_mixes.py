"""Made-up workloads: from the command line and from TOML, and what is wrong with them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from penstock.load.errors import LoadError
from penstock.load.mixes import MixPart, mixed, parse_mix, read_mix
from penstock.load.planning import Playing, planned


def test_both_ways_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    path.write_text('[[mix]]\nname = "chat"\nshare = 0.5\nturns = 3\nnew = 40\n[[mix]]\nnew = 900\n')
    assert read_mix(path) == parse_mix(["name=chat,share=0.5,turns=3,new=40", "new=900"])


def test_a_session_is_as_it_was_described() -> None:
    parts = parse_mix(["turns=3,system=100,tools=64,new=40,output=8,think=2.5"])
    found = planned(mixed(parts, 4, "seed"), Playing())
    assert found.has_sessions and len(found.sessions) == 4
    for session in found.sessions:
        assert [turn.tokens for turn in session.turns] == [204, 252, 300]
        assert [turn.think_s for turn in session.turns] == [0.0, 2.5, 2.5]
        assert [turn.new for turn in session.turns[1:]] == [40, 40]
        assert {turn.output for turn in session.turns} == {8}
        assert session.turns[0].tools == 64 and len(session.turns[0].system) == 164 // 16


def test_shares_are_how_often_kinds_come_and_spreads_how_far_lengths_are_apart() -> None:
    parts = parse_mix(["name=often,share=3,new=100", "name=seldom,share=1,new=100,spread=1"])
    trace = mixed(parts, 400, "seed")
    kinds = Counter(ask.session.split("-")[0] for ask in trace.asks)
    assert kinds["often"] > 2 * kinds["seldom"] > 0
    assert {ask.tokens for ask in trace.asks if "often" in ask.session} == {100}
    lengths = sorted(ask.tokens for ask in trace.asks if "seldom" in ask.session)
    assert lengths[len(lengths) // 10] < 60 and lengths[-len(lengths) // 10] > 150
    assert trace == mixed(parts, 400, "seed") and trace != mixed(parts, 400, "other")


def test_sub_agents_take_over_the_conversation_and_the_second_turn_waits_for_them() -> None:
    [session] = planned(mixed([MixPart(turns=2, new=64, output=16, agents=3)], 1, "s"), Playing()).sessions
    first, *subs, last = session.turns
    assert first.after == ()
    assert [(sub.agent, sub.after, sub.parent, sub.answered) for sub in subs] == [
        (agent, (0,), 0, True) for agent in (1, 2, 3)
    ]
    assert set(last.after) == {0, 1, 2, 3} and (last.parent, last.answered) == (0, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("turns", "--mix must be like turns=5"),
        ("turn=5", "unknown field `turn`"),
        ("turns=x", "--mix must be like"),
        ("turns=0", "turns must be from 1 to"),
        ("new=-4", "new must be from 1 to"),
        ("share=0", "share must be above 0"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(LoadError, match=said):
        parse_mix([text])


def test_a_file_that_is_no_mix(tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    with pytest.raises(LoadError, match="can't be read"):
        read_mix(path)
    broken = (b"\xff", b"mix = " + b"[" * 9999, b"mix = " + b"9" * 5000)
    for text in (b"mix", b"[[mix]]\nturnz = 1", b"[[other]]", b"mix = []", *broken):
        path.write_bytes(text)
        with pytest.raises(LoadError, match=r"no mix of sessions|no part of a mix"):
            read_mix(path)
