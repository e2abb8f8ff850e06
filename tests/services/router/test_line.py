"""Requests that are held back: by a planner with a clock of its own, and over real sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any

import grpc
import pytest
from tests.services.router.helpers import Harness, eventually
from tests.services.router.test_planner import Desk, key

from penstock.errors import Internal, Overloaded, PenstockError
from penstock.router.config import RouterConfig
from penstock.router.demand import HeldWork
from penstock.router.line import HeldAsk, WaitingLine
from penstock.router.plans import PlanAsk, Planned
from penstock.router.registry import HeldAdapter, Measured, Report, Seat
from penstock.router.workers import Role
from penstock.v1 import router_pb2


class Front:
    """A line before a planner, and one worker that computes 1000 tokens per second."""

    def __init__(self, **settings: Any) -> None:
        self.desk = Desk(silent_s=1e9, **settings)
        self.line = WaitingLine(self.desk.planner, RouterConfig(**settings), lambda: self.desk.now)
        self.placed: list[tuple[str, Planned]] = []
        self.held: dict[str, HeldAsk] = {}

    def join(self, name: str, role: Role = Role.BOTH, rate: float = 1000.0) -> Seat:
        seat = self.desk.join(name, role)
        seat.measure(Measured(rate, 1e9, 1e9, 0.001, 1e-6, 1e-9), self.desk.now)
        return seat

    def ask(self, name: str, tokens: int = 1000, **fields: Any) -> Planned | HeldAsk:
        found = self.line.enter(PlanAsk(model="m", prompt_tokens=tokens, max_tokens=10, **fields))
        if isinstance(found, Planned):
            self.placed.append((name, found))
        else:
            self.held[name] = found
        return found

    def turn(self) -> list[str]:
        """The names of those placed by it."""
        self.line.turn()
        done = [name for name, held in self.held.items() if isinstance(held.outcome, Planned)]
        self.placed += [(name, self.outcome(name)) for name in done]
        for name in done:
            del self.held[name]
        return done

    def outcome(self, name: str) -> Planned:
        outcome = self.held[name].outcome
        assert isinstance(outcome, Planned)
        return outcome

    def end(self, name: str) -> None:
        """The request is done."""
        (planned,) = [planned for each, planned in self.placed if each == name]
        self.placed.remove((name, planned))
        self.desk.planner.release(planned.number)

    def refused(self, name: str) -> PenstockError:
        outcome = self.held.pop(name).outcome
        assert isinstance(outcome, PenstockError)
        return outcome


@pytest.fixture
def counter() -> Front:
    counter = Front()
    counter.join("w")
    return counter


def test_who_would_only_wait_at_the_worker_waits_here(counter: Front) -> None:
    counter.ask("a", 900)
    counter.ask("b", 900)
    assert [name for name, _ in counter.placed] == ["a", "b"], "less than a second is before the second"
    counter.ask("c", 900)
    assert not counter.turn()
    assert len(counter.line) == 1
    counter.end("a")
    assert counter.turn() == ["c"]
    assert len(counter.line) == 0
    assert counter.placed[-1][1].held_s == 0.0


def test_who_is_held_back_for_a_worker_counts_for_those_behind() -> None:
    """Each computes 600 tokens at `a`, which has the others, and 3000 elsewhere. `a` has two seconds of others' work:
    the first waits for it, and the second, which would wait for both, does not."""
    counter = Front()
    counter.join("b")
    counter.join("a").hear(Report(queued_tokens=2000, free_kv_tokens=200_000), counter.desk.now)
    chains = [[key(number) for number in range(start, start + 150)] for start in (1000, 2000)]
    for chain in chains:
        counter.desk.planner.index.stored("a", chain)
    assert isinstance(counter.ask("first", 3000, block_keys=chains[0]), HeldAsk)
    second = counter.ask("second", 3000, block_keys=chains[1])
    assert isinstance(second, Planned) and second.decode.id == "b"


def test_those_behind_wait_for_all_that_wait_before_them(counter: Front) -> None:
    counter.ask("a", 5000)
    predicted = []
    for number, tokens in enumerate((300, 500, 700)):
        held = counter.ask(f"b{number}", tokens, tenant="t")
        assert isinstance(held, HeldAsk)
        predicted.append(held.holds.prompt_tokens)
    assert predicted == [300, 500, 700]
    line = counter.line._lines["m"]
    assert {name: ahead.prompt_tokens for name, ahead in line.blocked.items()} == {"w": 1500}
    counter.turn()
    assert {name: ahead.prompt_tokens for name, ahead in line.blocked.items()} == {"w": 1500}, "each counts once"


def test_a_long_line_costs_a_turn_no_more_than_a_short_one(counter: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind wait for a worker that is closed to them: nobody looks at them."""
    counter.ask("a", 5000)
    for number in range(200):
        assert isinstance(counter.ask(f"b{number}", 50), HeldAsk)
    queue, seen = counter.line._lines["m"].queue, []
    order = queue.order
    monkeypatch.setattr(queue, "order", lambda: (seen.append(entry) or entry for entry in order()))
    counter.turn()
    assert 0 < len(seen) < 20
    seen.clear()
    counter.end("a")
    assert len(counter.turn()) > 1
    assert len(seen) < 20 * 20, "a few for each that is placed"


def test_what_is_held_back_for_a_worker_is_what_all_that_wait_for_it_need() -> None:
    """However they came to wait there, and whoever has gone."""
    front, draw = Front(max_queue_s=20.0), Random(7)
    for name in "abc":
        front.join(name)
    waiting = 0
    for number in range(300):
        front.desk.now += draw.random() / 2
        if draw.random() < 0.6:
            with suppress(Overloaded):
                front.ask(f"n{number}", draw.choice((300, 900, 2500)), tenant=draw.choice("xy"))
        elif front.placed:
            front.end(draw.choice(front.placed)[0])
        elif front.held:
            front.line.leave(front.held.pop(draw.choice(list(front.held))))
        if draw.random() < 0.5:
            front.turn()
        front.held = {name: held for name, held in front.held.items() if held.outcome is None}
        line = front.line._lines.get("m")
        sums: dict[str, HeldWork] = {}
        for held in front.held.values():
            sums[held.at] = sums.get(held.at, HeldWork()).plus(held.holds)
        assert (dict(line.blocked) if line else {}) == sums
        waiting = max(waiting, len(sums))
    assert waiting == 3, "they have waited for each of them"


def test_how_long_it_was_held_is_told(counter: Front) -> None:
    counter.ask("a", 5000)
    counter.ask("b", 500)
    counter.desk.now += 3
    counter.end("a")
    assert counter.turn() == ["b"]
    assert counter.placed[-1][1].held_s == 3


def test_who_can_not_be_planned_stops_nobody_behind(counter: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    counter.ask("a", 5000)
    counter.ask("broken", 500, tenant="t")
    counter.ask("b", 600, tenant="t")
    plan = counter.desk.planner.try_plan

    def breaks(ask: PlanAsk, *closed: Any) -> Any:
        assert ask.prompt_tokens != 500, "a defect"
        return plan(ask, *closed)

    monkeypatch.setattr(counter.desk.planner, "try_plan", breaks)
    counter.end("a")
    assert counter.turn() == ["b"]
    assert isinstance(counter.refused("broken"), Internal)
    assert len(counter.line) == 0


def test_a_worker_that_is_free_is_not_kept_waiting() -> None:
    counter = Front()
    counter.join("slow", rate=100)
    assert isinstance(counter.ask("a", 1000), Planned)
    assert isinstance(counter.ask("b", 1000), HeldAsk)
    counter.join("new", rate=100)
    assert counter.turn() == [], "nothing changed where it waits"
    counter.desk.now += 1
    assert counter.turn() == ["b"], "but it is tried again"
    assert counter.placed[-1][1].decode.id == "new"


def test_the_decoder_has_to_have_room_too() -> None:
    counter = Front()
    counter.join("w", rate=1e9)
    for number in range(36):
        assert isinstance(counter.ask(f"a{number}", 100), Planned)
    assert isinstance(counter.ask("b", 100), HeldAsk), "the batch is full, and some wait"
    counter.end("a0")
    assert counter.turn() == ["b"]


def test_promised_context_has_to_fit() -> None:
    counter = Front()
    counter.join("w", rate=1e9)
    for number in range(7):
        assert isinstance(counter.ask(f"a{number}", 28_000), Planned)
    assert isinstance(counter.ask("b", 28_000), HeldAsk)
    assert isinstance(counter.ask("small", 100), HeldAsk), "it does not overtake the big one"
    counter.end("a0")
    assert counter.turn() == ["b", "small"]


def test_an_empty_worker_takes_whatever_it_can_hold() -> None:
    counter = Front(hold_s=0.0)
    counter.join("w")
    assert isinstance(counter.ask("a", 30_000), Planned)


def test_what_is_begun_is_not_held(counter: Front) -> None:
    counter.ask("a", 20_000)
    assert isinstance(counter.ask("b", 1000), HeldAsk)
    assert isinstance(counter.ask("moved", 1000, output_tokens=3), Planned)
    assert isinstance(counter.ask("tried", 1000, avoid=frozenset({"x"})), Planned)


def test_ten_to_one_and_nobody_waits_for_the_others_flood(counter: Front) -> None:
    """One worker; a tenant sends ten times as much as fits, another a tenth of what does. Every token computed is
    counted: the quiet one waits for what runs, and for one request of the flood."""
    for number in range(200):
        counter.ask(f"flood-{number}", 500, tenant="flood")
    waits: list[float] = []
    asked: dict[str, float] = {}
    for turn in range(60):
        if turn % 5 == 0:
            name = f"quiet-{turn}"
            asked[name] = counter.desk.now
            counter.ask(name, 500, tenant="quiet")
        counter.desk.now += 0.5
        first, _ = counter.placed[0]
        counter.end(first)
        if first in asked:
            waits.append(counter.desk.now - asked.pop(first))
        counter.turn()
    assert len(waits) >= 11
    assert max(waits) <= 5 * 0.5, "three before it at the worker, one of the flood, itself"
    served = Counter(name.split("-")[0] for name in counter.held)
    assert served["flood"] > 100, "the flood waits meanwhile"


def test_a_priority_counts_in_its_tenant_and_ages(counter: Front) -> None:
    counter.ask("running", 10_000)
    counter.ask("late", tenant="a", priority=5)
    counter.ask("soon", tenant="a")
    counter.ask("first", tenant="a", priority=-5)
    counter.ask("other", tenant="b", priority=1000)
    assert [entry.item for entry in counter.line._lines["m"].queue.order()] == [
        counter.held[name] for name in ("first", "other", "soon", "late")
    ]
    counter.desk.now += 11
    counter.ask("newer", tenant="a", priority=-5)
    order = [entry.item for entry in counter.line._lines["m"].queue.order()]
    assert order.index(counter.held["late"]) < order.index(counter.held["newer"])


def test_who_leaves_is_gone(counter: Front) -> None:
    counter.ask("a", 10_000)
    counter.ask("b")
    counter.ask("c")
    counter.line.leave(counter.held["b"])
    assert len(counter.line) == 1
    counter.end("a")
    assert counter.turn() == ["c"]
    counter.line.leave(counter.held["b"])
    assert len(counter.line) == 0


def test_too_long_a_wait_is_refused_at_once_or_when_it_was() -> None:
    counter = Front(max_queue_s=30.0)
    counter.join("w")
    counter.ask("a", 8000)
    for number in range(3):
        counter.ask(f"b{number}", 10_000, tenant="flood")
    with pytest.raises(Overloaded) as refused:
        counter.ask("c", 10_000, tenant="flood")
    assert (refused.value.code, refused.value.http_status) == ("queue_full", 503)
    assert refused.value.retry_after is not None
    assert isinstance(counter.ask("quiet", 100, tenant="quiet"), HeldAsk), "it would not wait for all of them"
    counter.desk.now += 30.0
    counter.turn()
    assert {counter.refused(name).code for name in ("b0", "b1", "b2", "quiet")} == {"queue_full"}
    assert len(counter.line) == 0


def test_a_full_line_lets_the_last_of_the_longest_go() -> None:
    counter = Front(max_held=4)
    counter.join("w")
    counter.ask("a", 2000)
    for number in range(4):
        counter.ask(f"flood-{number}", tenant="flood")
    with pytest.raises(Overloaded):
        counter.ask("flood-4", tenant="flood")
    counter.ask("quiet", tenant="quiet")
    assert counter.refused("flood-3").code == "queue_full"
    assert len(counter.line) == 4


def test_the_memory_of_keys_is_bounded() -> None:
    counter = Front(max_held_bytes=10_000)
    counter.join("w")
    counter.ask("a", 20_000)
    counter.ask("b", 1600, block_keys=[key(number) for number in range(100)])
    with pytest.raises(Overloaded):
        counter.ask("c", 1600, block_keys=[key(number) for number in range(100)])
    with pytest.raises(Overloaded):
        counter.ask("huge", 32_000, block_keys=[key(number) for number in range(2000)], tenant="other")
    assert len(counter.line) == 1


def test_a_target_that_can_not_be_met_is_refused_before_any_work(counter: Front) -> None:
    assert isinstance(counter.ask("a", 900, first_token_s=1.0), Planned)
    with pytest.raises(Overloaded) as refused:
        counter.ask("b", 900, first_token_s=1.0)
    assert (refused.value.code, refused.value.field) == ("slo_unmet", "penstock.slo.ttft")
    assert "1.8 s" in refused.value.message
    assert "1 s" in refused.value.message
    with pytest.raises(Overloaded) as refused:
        counter.ask("c", 10, token_s=0.0001)
    assert refused.value.field == "penstock.slo.itl"
    counter.ask("long", 8000)
    assert isinstance(counter.ask("d", 900, first_token_s=12.0), HeldAsk)
    counter.desk.now += 12.0
    counter.turn()
    assert counter.refused("d").code == "slo_unmet"


def test_a_target_chooses_the_worker_that_meets_it() -> None:
    counter = Front()
    counter.join("quick", rate=10_000.0)
    slow = counter.join("slow", rate=5000.0)
    slow.hear(Report(running=2, free_kv_tokens=200_000), counter.desk.now)
    counter.desk.planner.plan(PlanAsk(model="m", prompt_tokens=9000, max_tokens=1))
    found = counter.ask("a", 2000, first_token_s=0.5)
    assert isinstance(found, Planned)
    assert found.decode.id == "slow"


def test_a_target_that_nobody_meets_does_not_make_the_router_look_at_everybody() -> None:
    counter = Front()
    for number in range(400):
        counter.join(f"w{number}")
    shortlist = counter.desk.planner.shortlist
    for target in ({"token_s": 1e-4}, {"first_token_s": 1e-3}):
        with pytest.raises(Overloaded):
            counter.ask("never", 1000, **target)
        assert shortlist.looked_at <= 100


def test_of_many_workers_the_one_that_meets_a_target_is_found() -> None:
    counter = Front()
    for number in range(400):
        counter.join(f"w{number}", rate=100.0)
    counter.join("quick", rate=20_000.0)
    found = counter.ask("a", 1000, first_token_s=0.1)
    assert isinstance(found, Planned)
    assert found.decode.id == "quick"


def test_its_workers_leave() -> None:
    counter = Front()
    seat = counter.join("w")
    counter.ask("a", 5000)
    counter.ask("b", 500)
    counter.desk.planner.registry.leave(seat)
    counter.turn()
    assert counter.refused("b").http_status == 503


# -- over real sockets


async def busy(mesh: Harness, tokens: int = 10_000) -> tuple[Any, Any]:
    member = await mesh.join("w")
    load = router_pb2.Load(prefill_tokens_per_s=1000.0, free_kv_tokens=100_000)
    await member.write(router_pb2.JoinRequest(load=load))
    seats = mesh.router.planner.registry
    await eventually(lambda: (seat := seats.get("w")) and seat.measured.prefill_rate)
    call, plan = await mesh.plan(tokens=7000)
    assert plan.decode.member_id == "w"
    return member, call


async def test_a_plan_comes_when_a_worker_has_room(mesh: Harness) -> None:
    _, running = await busy(mesh)
    call, answer = await mesh.plan(tokens=500)
    assert answer.held.wait_s >= 0
    assert not answer.HasField("decode")
    await running.write(router_pb2.PlanRequest(progress=router_pb2.PlanProgress(prefill_done=True, generated=1)))
    plan = await call.read()
    assert plan.decode.member_id == "w" and plan.epoch
    assert plan.reasons.held_s > 0
    await mesh.gone(call)
    await mesh.gone(running)
    await eventually(lambda: mesh.router.planner.ledger.empty)


async def test_a_request_whose_gateway_leaves_is_gone_from_the_line(mesh: Harness) -> None:
    _, running = await busy(mesh)
    calls = [await mesh.plan(tokens=500) for _ in range(3)]
    assert len(mesh.router.line) == 3
    for call, _ in calls[:2]:
        await mesh.gone(call)
    await eventually(lambda: len(mesh.router.line) == 1)
    await mesh.gone(running)
    assert (await calls[2][0].read()).decode.member_id == "w"
    await mesh.gone(calls[2][0])
    await eventually(lambda: mesh.router.planner.ledger.empty)


async def test_who_waits_too_long_hears_so(start: Callable[..., Awaitable[Harness]]) -> None:
    mesh = await start(max_queue_s=9.0)
    await busy(mesh)
    call, _ = await mesh.plan(tokens=500)
    mesh.router.line._clock = lambda: asyncio.get_running_loop().time() + 1e6
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_what_a_gateway_may_not_say(mesh: Harness) -> None:
    await mesh.join("w")
    for wrong in ({"weight": -1.0}, {"weight": float("nan")}, {"priority": 2000}, {"first_token_s": -1.0}):
        call = mesh.stub.Plan()
        mesh.calls.append(call)
        request = router_pb2.PlanAsk(model_name="m", prompt_tokens=10, **wrong)
        await call.write(router_pb2.PlanRequest(ask=request))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_big_request_is_not_overtaken_by_those_of_an_adapter_of_its_model() -> None:
    """They have the same workers."""
    counter = Front()
    seat = counter.join("w", rate=1e9)
    counter.desk.planner.registry.adapt(seat, {"x": HeldAdapter(fingerprint="f", directory="/x")})
    for number in range(6):
        counter.ask(f"{number}", 30_000)
    counter.ask("big", 30_000)
    assert list(counter.held) == ["big"], "it does not fit beside them, as a small one would"
    found = counter.line.enter(PlanAsk(model="m:x", prompt_tokens=100, max_tokens=10))
    assert isinstance(found, HeldAsk) and len(counter.line) == 2
    counter.end("0")
    assert counter.turn() == ["big"]
    counter.line.leave(found)
    assert len(counter.line) == 0


def test_who_waits_is_not_refused_because_as_many_plans_live_as_may(counter: Front) -> None:
    counter.desk.planner._max_live = 2
    counter.ask("a", 900)
    counter.ask("b", 900)
    counter.desk.planner._max_live = 4
    counter.ask("c", 900)
    counter.ask("e", 900)
    assert list(counter.held) == ["c", "e"]
    counter.desk.planner._max_live = 2
    counter.desk.now += 2
    assert not counter.turn() and counter.held["c"].outcome is None
    counter.end("a")
    counter.end("b")
    counter.desk.planner._max_live = 1
    assert counter.turn() == ["c"] and counter.held["e"].outcome is None, "one place for two"
    with pytest.raises(Overloaded, match="in flight"):
        counter.ask("d")
    counter.end("c")
    assert counter.turn() == ["e"]
