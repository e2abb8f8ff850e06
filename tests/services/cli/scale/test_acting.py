"""What was ordered and has not come, and what failed: nothing is lost, nothing is asked for again and again."""

from __future__ import annotations

from collections.abc import Set

import pytest

from penstock.cli.asking import MeshAccess
from penstock.cli.scale.acting import ScaleActs
from penstock.cli.scale.actuators.base import ActuatorFailed, WorkerPlace
from penstock.cli.scale.metrics import ScaleMetrics
from penstock.cli.scale.state import ScaleAction, WorkerSeen, WorkRole
from penstock.runtime.addresses import HostPort

PLACE = WorkerPlace("w1", "127.0.0.1:7500")
ADD = ScaleAction(kind="add", role="decode", reason="a test")
REMOVE = ScaleAction(kind="remove", role="decode", worker="w1", reason="a test")


class FakeActuator:
    """Does what it is asked for, or fails."""

    adds = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails = False

    def removes(self, worker: WorkerPlace) -> bool:
        return True

    async def add(self, role: WorkRole) -> None:
        self._ask(f"add {role}")

    async def remove(self, worker: WorkerPlace) -> None:
        self._ask(f"remove {worker.id}")

    async def give_up(self, role: WorkRole, joined: Set[str]) -> None:
        self.asked.append(f"give up {role}, not {', '.join(sorted(joined))}")

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.fails:
            raise ActuatorFailed("it is out of order")


class Acts:
    """Acts on a clock of the test's own, before a router that nobody reaches."""

    def __init__(self) -> None:
        self.now = 100.0
        self.actuator, self.metrics = FakeActuator(), ScaleMetrics()
        self.acts = ScaleActs(
            MeshAccess(router=(HostPort("127.0.0.1:1"),)), self.metrics, lambda: self.now, start_s=10.0
        )

    async def do(self, action: ScaleAction) -> None:
        await self.acts.do(action, {"w1": PLACE}, self.actuator)

    def failures(self, kind: str) -> float:
        return self.metrics.failures.labels(kind)._value.get()


def seen(id: str, role: WorkRole = "decode") -> WorkerSeen:
    return WorkerSeen(id=id, role=role, ready=True)


async def test_a_worker_that_was_ordered_counts_until_it_has_come() -> None:
    one = Acts()
    await one.acts.welcome([seen("w0")], {"w0"})
    await one.do(ADD)
    assert one.acts.starting() == {"decode": 1}
    await one.acts.welcome([seen("w0")], {"w0"})
    assert one.acts.starting() == {"decode": 1}
    await one.acts.welcome([seen("w0"), seen("new")], {"w0", "new"})
    assert one.acts.starting() == {}


async def test_workers_that_are_there_at_the_first_look_were_not_ordered() -> None:
    one = Acts()
    await one.do(ADD)
    await one.acts.welcome([seen("w0")], {"w0"})
    assert one.acts.starting() == {"decode": 1}


async def test_an_actuator_that_fails_is_left_alone_for_longer_and_longer() -> None:
    one = Acts()
    one.actuator.fails = True
    for _ in range(3600):
        await one.do(ADD)
        one.now += 1
    assert one.acts.starting() == {}
    assert 5 < len(one.actuator.asked) < 25
    assert one.failures("add") == len(one.actuator.asked)
    one.actuator.fails = False
    one.now += 400
    await one.do(ADD)
    assert one.acts.starting() == {"decode": 1}
    assert one.acts.can_use_actuator


async def test_a_worker_that_does_not_come_is_given_up() -> None:
    one = Acts()
    await one.do(ADD)
    one.now += 101
    assert one.acts.starting() == {}
    assert one.failures("add") == 1
    assert not one.acts.can_use_actuator


async def test_the_actuator_hears_once_that_an_order_is_given_up() -> None:
    """Else a local process would stay, and take the place of those that could start."""
    one = Acts()
    await one.do(ADD)
    one.now += 101
    one.acts.starting()
    for _ in range(2):
        await one.acts.settle(one.actuator, {"w1": PLACE})
    assert one.actuator.asked == ["add decode", "give up decode, not 127.0.0.1:7500"]


async def test_a_worker_that_was_taken_away_and_stays_gets_work_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a StatefulSet ends another pod: the planner would not see it, and nobody would undrain it."""
    one = Acts()
    await one.acts.welcome([seen("w0"), seen("w1")], {"w0", "w1"})
    await one.do(REMOVE)
    for seconds in (50, 51):
        assert one.acts.gone == {"w1"} and one.failures("undrain") == 0
        one.now += seconds
        await one.acts.settle(one.actuator, {"w0": PLACE})
    assert one.failures("undrain") == 1 and one.acts.drained == {"w1"}, "no router hears it here"
    assert one.acts.gone == {"w1"}, "else it would be taken away once more"
    told = []

    async def tell(worker, command):
        told.append((worker, command.drain))

    monkeypatch.setattr(one.acts, "_tell", tell)
    await one.acts.settle(one.actuator, {"w0": PLACE})
    assert told == [("w1", False)] and one.acts.gone == one.acts.drained == set()
    await one.do(ADD)
    await one.acts.welcome([seen("w0"), seen("w1")], {"w0", "w1"})
    assert one.acts.starting() == {"decode": 1}, "it is none that was ordered"


async def test_a_worker_that_could_not_start_is_no_more_expected() -> None:
    one = Acts()
    await one.do(ADD)
    one.acts.lost("prefill")
    assert one.acts.starting() == {"decode": 1}
    one.acts.lost("decode")
    assert one.acts.starting() == {} and not one.acts.can_use_actuator


async def test_a_worker_is_taken_away_once_and_kept_where_that_fails() -> None:
    one = Acts()
    one.actuator.fails = True
    await one.do(REMOVE)
    assert one.acts.gone == set()
    one.actuator.fails = False
    one.now += 60
    await one.do(REMOVE)
    assert one.acts.gone == {"w1"}
    await one.acts.welcome([], {"w1"})
    assert one.acts.gone == {"w1"}, "the router still names it"
    await one.acts.welcome([], set())
    assert one.acts.gone == set()


async def test_where_no_router_answers_a_command_is_counted_and_that_is_all() -> None:
    one = Acts()
    for kind in ("drain", "undrain", "flip"):
        await one.do(ScaleAction(kind=kind, role="decode", worker="w1", reason="a test"))
        assert one.failures(kind) == 1
    assert one.acts.drained == set()


async def test_a_worker_that_comes_with_another_role_is_told_the_one_that_was_ordered() -> None:
    """No router hears it, which is counted."""
    one = Acts()
    await one.acts.welcome([], set())
    await one.do(ADD)
    await one.acts.welcome([seen("new", "prefill")], {"new"})
    assert one.acts.starting() == {}
    assert one.failures("flip") == 1


async def test_those_that_were_drained_are_brought_back_at_the_end() -> None:
    one = Acts()
    one.acts.drained |= {"w1", "w2"}
    await one.acts.bring_back()
    assert one.failures("undrain") == 2
    assert one.acts.drained == set()


async def test_who_is_away_for_a_moment_is_no_new_worker_and_keeps_its_place() -> None:
    """As when a router starts again and knows some of them: else they would be taken for those that were ordered."""
    one = Acts()
    both = [seen("w0"), seen("w1")]
    await one.acts.welcome(both, {"w0", "w1"})
    one.acts.drained.add("w1")
    assert not one.acts.missing()
    one.now += 5
    await one.acts.welcome(both[:1], {"w0"})
    assert one.acts.missing(), "nothing is decided meanwhile"
    await one.do(ADD)
    one.now += 5
    await one.acts.welcome(both, {"w0", "w1"})
    assert one.acts.starting() == {"decode": 1} and one.acts.drained == {"w1"} and not one.acts.missing()
    one.now += 5
    await one.acts.welcome(both[:1], {"w0"})
    one.now += 16
    await one.acts.welcome(both[:1], {"w0"})
    assert not one.acts.missing(), "it has gone for good"
    one.now += 120
    await one.acts.welcome(both[:1], {"w0"})
    assert not one.acts.drained


async def test_a_mesh_that_was_not_seen_for_long_may_come_back_bit_by_bit() -> None:
    one = Acts()
    both = [seen("w0"), seen("w1")]
    await one.acts.welcome(both, {"w0", "w1"})
    one.now += 300
    await one.acts.welcome(both[:1], {"w0"})
    assert one.acts.missing()
    await one.do(ADD)
    one.now += 5
    await one.acts.welcome(both, {"w0", "w1"})
    assert one.acts.starting() == {"decode": 1} and not one.acts.missing()


async def test_who_was_taken_away_is_not_missed() -> None:
    one = Acts()
    await one.acts.welcome([seen("w0"), seen("w1")], {"w0", "w1"})
    await one.do(REMOVE)
    for listed in ({"w0", "w1"}, {"w0"}):
        one.now += 5
        await one.acts.welcome([seen("w0")], listed)
        assert not one.acts.missing()
