"""Requests that yield, at the router: places that nobody else wants, and nothing that others see of it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.services.router.helpers import Harness, eventually
from tests.services.router.test_planner import Desk

from penstock.errors import NotFound, Overloaded, TooLarge
from penstock.router.line import HeldAsk
from penstock.router.plans import PlanAsk, Planned
from penstock.router.registry import HeldAdapter, Report
from penstock.router.running import RunningPlan
from penstock.router.workers import Role
from penstock.router.yielding import YieldingLine

PLACES = 32 + 4
"""Of a worker of these tests: its batch, and those that wait there for the next place."""


class Yard:
    """A line of requests that yield, before a planner."""

    def __init__(self, *workers: str, **settings: Any) -> None:
        self.desk = Desk(silent_s=1e9)
        self.line = YieldingLine(
            self.desk.planner, lambda: self.desk.now, **{"most_held": 100, "most_live": 1000} | settings
        )
        for name in workers:
            self.desk.join(name, Role.BOTH)

    def ask(self, tenant: str = "t", **fields: Any) -> Planned | HeldAsk:
        return self.line.enter(
            PlanAsk(model="m", prompt_tokens=100, max_tokens=10, tenant=tenant, yields=True, **fields)
        )

    def placed(self, **fields: Any) -> Planned:
        found = self.ask(**fields)
        assert isinstance(found, Planned)
        return found

    def held(self, **fields: Any) -> HeldAsk:
        found = self.ask(**fields)
        assert isinstance(found, HeldAsk)
        return found


def test_a_worker_has_as_many_as_its_batch_and_a_few_that_wait():
    yard = Yard("w")
    first = [yard.placed() for _ in range(PLACES)]
    held = yard.held()
    assert not yard.line.turn() and held.outcome is None and len(yard.line) == 1
    yard.line.release(first[0].number)
    yard.desk.now += 5
    yard.line.turn()
    assert isinstance(held.outcome, Planned) and held.outcome.held_s == 5 and len(yard.line) == 0
    assert yard.line.live == PLACES


def test_all_workers_are_filled_and_nobody_beyond():
    yard = Yard("a", "b", "c")
    where = [yard.placed().decode.id for _ in range(3 * PLACES)]
    assert {name: where.count(name) for name in "abc"} == dict.fromkeys("abc", PLACES)
    yard.held()


def test_nothing_of_them_is_charged_or_learned():
    yard = Yard("w")
    before = yard.desk.planner.plan(PlanAsk(model="m", prompt_tokens=100, max_tokens=10, tenant="t"))
    yard.desk.planner.release(before.number)
    for _ in range(PLACES):
        yard.placed(session="s")
    planner = yard.desk.planner
    assert planner.ledger.empty and planner.homes.get(("m", "s"), yard.desk.now) is None
    after = planner.plan(PlanAsk(model="m", prompt_tokens=100, max_tokens=10, tenant="t"))
    assert after.decision.chosen.cost_s == before.decision.chosen.cost_s
    assert [seat.suspect_until for seat in planner.registry] == [0.0], "to be full is no fault"


def test_what_others_have_leaves_fewer_places():
    yard = Yard("w")
    [seat] = yard.desk.planner.registry
    seat.hear(Report(running=10, free_kv_tokens=200_000), yard.desk.now)
    for _ in range(PLACES - 10):
        yard.placed()
    held = yard.held()
    seat.hear(Report(running=9, free_kv_tokens=200_000), yard.desk.now)
    yard.line.turn()
    assert isinstance(held.outcome, Planned)


def test_of_those_of_another_router_the_worker_tells():
    yard = Yard()
    yard.desk.join("w", Role.BOTH, routers=2)
    [seat] = yard.desk.planner.registry
    seat.hear(Report(free_kv_tokens=200_000, yielding=PLACES - 1), yard.desk.now)
    yard.placed()
    seat.hear(Report(free_kv_tokens=200_000, yielding=PLACES), yard.desk.now)
    yard.held()


def test_tenants_share_what_there_is():
    yard = Yard("w")
    first = [yard.placed() for _ in range(PLACES)]
    waiting = [(tenant, yard.held(tenant=tenant)) for tenant in ("a", "a", "a", "b", "b")]
    order = []
    for planned in first[:4]:
        yard.line.release(planned.number)
        yard.line.turn()
        order += [tenant for tenant, held in waiting if held.outcome and not order.count(held)]
        waiting = [(tenant, held) for tenant, held in waiting if not held.outcome]
    assert order == ["a", "b", "a", "b"]


def test_prompts_go_where_prompts_are_computed_as_far_as_there_is_room():
    yard = Yard()
    yard.desk.join("p", Role.PREFILL)
    yard.desk.join("d", Role.DECODE)
    yard.desk.join("e", Role.DECODE)
    plans = [yard.placed() for _ in range(2 * PLACES)]
    apart = [plan for plan in plans if plan.prefill]
    assert len(apart) <= PLACES
    for plan in apart:
        yard.line.prefilled(plan.number)
        yard.line.release(plan.number)
    assert yard.line.live == 2 * PLACES - len(apart)


def test_who_leaves_the_line_gets_no_place():
    yard = Yard("w")
    first = [yard.placed() for _ in range(PLACES)]
    gone, next_one = yard.held(), yard.held()
    yard.line.leave(gone)
    yard.line.release(first[0].number)
    yard.line.turn()
    assert gone.outcome is None and isinstance(next_one.outcome, Planned)
    yard.line.leave(next_one)


def test_bounds_and_refusals():
    yard = Yard("w", most_held=1, most_live=2)
    yard.placed(), yard.placed()
    held = yard.held()
    with pytest.raises(Overloaded):
        yard.ask()
    yard.line.leave(held)
    yard = Yard("w")
    with pytest.raises(NotFound):
        yard.line.enter(PlanAsk(model="other", prompt_tokens=1, max_tokens=1, yields=True))
    with pytest.raises(TooLarge):
        yard.line.enter(PlanAsk(model="m", prompt_tokens=10**7, max_tokens=1, yields=True))


def test_what_another_router_has_planned_takes_a_place():
    yard = Yard("w")
    number = yard.line.keep(RunningPlan("", "w"))
    for _ in range(PLACES - 1):
        yard.placed()
    held = yard.held()
    yard.line.release(number)
    yard.line.turn()
    assert isinstance(held.outcome, Planned)


async def test_over_the_wire_a_place_comes_free_with_the_stream_that_has_it(start):
    harness: Harness = await start()
    await harness.join("w", max_running=8)
    streams = [await harness.plan(yields=True) for _ in range(8 + 1)]
    assert all(answer.decode.member_id == "w" for _, answer in streams)
    call, answer = await harness.plan(yields=True)
    assert answer.HasField("held")
    assert (
        harness.router.planner.ledger.empty
        and harness.router.metrics.registry.get_sample_value("penstock_held_yielding_requests") == 1
    )
    another, other = await harness.plan()
    assert other.decode.member_id == "w" and not other.HasField("held"), "others don't wait for them"
    await harness.gone(another)
    await harness.gone(streams[0][0])
    assert (await call.read()).decode.member_id == "w"
    for each, _ in [*streams[1:], (call, answer)]:
        await harness.gone(each)
    await eventually(lambda: not harness.router.yielding.live and not len(harness.router.yielding))


def test_lines_for_an_adapter_go_to_those_who_have_it():
    yard = Yard("plain", "adapted")
    registry = yard.desk.planner.registry
    registry.adapt(registry.get("adapted"), {"x": HeldAdapter(fingerprint="f", directory="/x")})
    ask = PlanAsk(model="m:x", prompt_tokens=100, max_tokens=10, tenant="t", yields=True)
    placed = [yard.line.enter(ask) for _ in range(PLACES)]
    assert {planned.decode.id for planned in placed} == {"adapted"}
    assert isinstance(yard.line.enter(ask), HeldAsk), "the others can't take it"
