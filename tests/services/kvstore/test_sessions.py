"""What is known of sessions, against a twin that keeps every word it ever heard."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.kvstore.sessions import SessionPhase, SessionTable

NAMES = st.sampled_from(["a", "b", "c", "d"])
MOST = 3


@dataclass
class Naive:
    """Everything that was said, in order; answers by reading it all again."""

    said: list[tuple[str, str, SessionPhase | None, float, float | None]] = field(default_factory=list)

    def known(self) -> list[str]:
        names: list[str] = []
        for name, *_ in self.said:
            names = [*(one for one in names if one != name), name][-MOST:]
        return names

    def read(self) -> tuple[dict[str, tuple[SessionPhase, float, float]], dict[str, float]]:
        """SessionPhase, since and expected of each known session, and those expected whom nobody named yet."""
        now_known: list[str] = []
        states: dict[str, tuple[SessionPhase, float, float]] = {}
        gaps: dict[tuple[str, SessionPhase], list[float]] = {}
        waiting: dict[str, float] = {}
        for kind, name, state, now, number in ((k, n, s, t, x) for n, k, s, t, x in self.said):
            if kind == "due":
                assert number is not None
                waiting = {one: end for one, end in waiting.items() if end > now + number}
                continue
            now_known = [*(one for one in now_known if one != name), name]
            if len(now_known) > MOST:
                gone = now_known.pop(0)
                states.pop(gone, None)
                waiting.pop(gone, None)
                gaps = {at: found for at, found in gaps.items() if at[0] != gone}
            old = states.get(name)
            if kind == "used":
                if old is not None and old[0] is SessionPhase.ACTIVE:
                    continue
                if old is not None and old[0] in (SessionPhase.TOOL, SessionPhase.USER):
                    for at in ((name, old[0]), ("", old[0])):
                        gaps.setdefault(at, []).append(math.log(max(1e-3, now - old[1])))
                states[name] = SessionPhase.ACTIVE, now, math.inf
            else:
                if state is None:
                    state = SessionPhase.USER if old is None or old[0] is SessionPhase.ENDED else old[0]
                gap = math.inf
                if number is not None and state is not SessionPhase.ENDED:
                    gap = number
                elif ("", state) in gaps:
                    own = gaps.get((name, state), [])
                    gap = math.exp((len(own) * mean(own) + 2 * mean(gaps["", state])) / (len(own) + 2))
                states[name] = state, now, now + gap
            waiting.pop(name, None)
            if states[name][2] < math.inf:
                waiting[name] = states[name][2]
        return states, waiting


def mean(values: list[float]) -> float:
    """The mean, in which a value counts less the more came after the sixteenth."""
    result = 0.0
    for number, value in enumerate(values, 1):
        result += (value - result) / min(number, 16)
    return result


class SessionTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []
        self.table = SessionTable(MOST, listeners=[lambda session: self.heard.append(session)])
        self.stack = ExitStack()
        self.awaited = [self.stack.enter_context(self.table.awaited(100.0)) for _ in range(2)]
        self.naive = Naive()
        self.now = 100.0

    @rule(seconds=st.sampled_from([0.25, 1.0, 7.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=NAMES)
    def use(self, name: str) -> None:
        self.table.used(name, self.now)
        self.naive.said.append((name, "used", None, self.now, None))

    @rule(
        name=NAMES,
        state=st.sampled_from([*SessionPhase, None]),
        returns_in=st.sampled_from([None, None, 0.0, 3.0, 50.0]),
    )
    def hint(self, name: str, state: SessionPhase | None, returns_in: float | None) -> None:
        self.heard.clear()
        self.table.hint(name, state, self.now, returns_in)
        assert self.heard == [name]
        self.naive.said.append((name, "hint", state, self.now, returns_in))

    @rule(ahead=st.sampled_from([0.0, 2.0, 60.0]))
    def due(self, ahead: float) -> None:
        _, waiting = self.naive.read()
        expected = sorted((end, name) for name, end in waiting.items() if end <= self.now + ahead + 1e-9)
        for awaited in self.awaited:
            assert sorted(awaited.due(self.now, ahead)) == sorted(name for _, name in expected)
        self.naive.said.append(("", "due", None, self.now, ahead))

    @invariant()
    def agree(self) -> None:
        states, waiting = self.naive.read()
        assert len(self.table) == len(states)
        for name in "abcd":
            outlook = self.table.known(name)
            if name not in states:
                assert outlook is None
                continue
            assert outlook is not None
            state, since, expected_at = states[name]
            assert (outlook.state, outlook.since) == (state, since)
            assert outlook.expected_at == pytest.approx(expected_at, rel=1e-9)
        for awaited in self.awaited:
            assert awaited.next_due() <= min(waiting.values(), default=math.inf) + 1e-6

    def teardown(self) -> None:
        self.stack.close()


SessionTableMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestSessionTable = SessionTableMachine.TestCase


def test_nothing_is_expected_before_something_was_learned() -> None:
    table = SessionTable()
    table.hint("a", SessionPhase.TOOL, 0.0)
    assert table.known("a").expected_at == math.inf
    table.used("a", 4.0)
    table.hint("b", SessionPhase.TOOL, 10.0)
    assert table.known("b").expected_at == pytest.approx(14.0), "others' tools took 4 s"
    table.hint("b", SessionPhase.USER, 10.0)
    assert table.known("b").expected_at == math.inf, "of users nothing is known"


def test_a_session_of_its_own_pace_is_believed_soon() -> None:
    table = SessionTable()
    now = 0.0
    for turn in range(40):
        for name, gap in (("slow", 100.0), ("quick", 1.0)):
            table.hint(name, SessionPhase.TOOL, now)
            if turn == 39:
                expected = table.known(name).expected_at - now
                assert gap / 2 < expected < gap * 2
            now += gap
            table.used(name, now)


def test_the_table_stays_small() -> None:
    table = SessionTable(100)
    with table.awaited(0.0) as looking, table.awaited(0.0) as idle:
        for number in range(10_000):
            table.hint(str(number), SessionPhase.TOOL, float(number), 5.0)
            table.hint("always", SessionPhase.TOOL, float(number), 5.0)
            looking.due(float(number), 1.0)
        assert len(table) == 100
        for awaited in (looking, idle):
            assert len(awaited._expected) < 300 and len(awaited._told) < 300
    assert table.known("always") is not None


def test_nobody_is_no_session() -> None:
    table = SessionTable()
    table.used("", 0.0)
    table.hint("", SessionPhase.ENDED, 0.0)
    assert len(table) == 0
