"""The few that are looked at, beside a look at all: nobody who was left out would have been better by much."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from penstock.kv.spec import KvSpec
from penstock.router.config import RouterConfig
from penstock.router.costs import decode_s, handed_s, prompt_cost, room_s
from penstock.router.demand import Demand, Knobs
from penstock.router.facts import Holdings
from penstock.router.options import Decision
from penstock.router.planner import Planner
from penstock.router.plans import PlanAsk
from penstock.router.policy import decide
from penstock.router.registry import Measured, Member, Report, Seat
from penstock.router.workers import Role, WorkerFacts

from .helpers import keys

SPEC = KvSpec(model="m", tokenizer="t", layout="v1", dtype="float32", block_size=16, block_bytes=1 << 18)

STRICT = Knobs(tie=0, home_margin=-1)
"""The cheapest, and nobody else for any other reason."""


class World:
    """A planner with many members, drawn at random, in the middle of its work."""

    def __init__(self, seed: int, workers: int) -> None:
        draw = self.draw = Random(seed)
        self.now = 1000.0
        self.planner = Planner(RouterConfig(seed=1, max_members=5000, silent_s=10.0), lambda: self.now)
        hosts = max(1, workers // 4)
        self.away = draw.choice((0.0, 0.0, 0.3, 1.0))
        """The part of the workers that have lost their store."""
        roles = draw.choice([(Role.BOTH,), (Role.PREFILL, Role.DECODE), tuple(Role)])
        self.seats = [self.join(f"w{number}", draw.choice(roles), draw.randrange(hosts)) for number in range(workers)]
        self.join("decodes", Role.DECODE, 0)
        stores = [self.join(f"s{host}", None, host) for host in range(0, hosts, draw.choice((1, 2)))]
        self.prompts = [[*keys(draw.randrange(200)), *keys(draw.randrange(1, 600), chain)] for chain in range(1, 9)]
        for seat in draw.choices([*self.seats, *stores], k=3 * workers):
            prompt = draw.choice(self.prompts)
            self.planner.index.stored(seat.member.id, prompt[: draw.randrange(len(prompt))])
        for _ in range(workers):
            self.planner.plan(self.ask())
            self.now += draw.choice((0.0, 0.01, 0.1))

    def join(self, name: str, role: Role | None, host: int) -> Seat:
        draw = self.draw
        seat = self.planner.registry.join(
            Member(
                id=name,
                role=role,
                address=f"{name}:1",
                host_id=f"h{host}",
                model="m" if role else "",
                spec=SPEC if role else None,
                max_model_len=32_768,
                max_running=draw.choice((8, 64)),
                kv_capacity_tokens=draw.choice((20_000, 200_000)),
            ),
            self.now,
        )
        if role:
            step_s = draw.uniform(0.005, 0.05)
            links = draw.choice((1e7, 1e9)), draw.choice((1e6, 1e8, 1e9))
            rates = Measured(draw.uniform(500, 5000), *links, step_s, step_s / 32, step_s / 200_000)
            if draw.random() < 0.7:
                rates = rates._replace(
                    prompt_s=1 / draw.uniform(500, 5000), prompt_context_s=10 ** draw.uniform(-9, -6)
                )
            if draw.random() < 0.7:
                near, far = draw.choice((0.001, 0.2)), draw.choice((0.01, 0.5))
                rates = rates._replace(handoff_overhead_s=near, handoff_rate=draw.choice((1e7, 1e10)))
                rates = rates._replace(far_handoff_overhead_s=far, far_handoff_rate=draw.choice((1e6, 1e9)))
            seat.measure(rates, self.now - draw.choice((0, 60)))
            busy = Report(draw.randrange(8), draw.randrange(3), draw.randrange(0, 9000), draw.randrange(20_000))
            report = busy if draw.random() < 0.7 else Report(free_kv_tokens=200_000)
            seat.hear(replace(report, store_away=draw.random() < self.away), self.now)
        return seat

    def ask(self) -> PlanAsk:
        prompt = self.draw.choice(self.prompts)
        cut = self.draw.randrange(1, len(prompt) + 1)
        more = self.draw.randrange(1, 2000)
        failed = self.draw.sample([seat.member.id for seat in self.seats], k=self.draw.choice((0, 0, 1)))
        return PlanAsk(
            model="m",
            prompt_tokens=16 * cut + more,
            max_tokens=self.draw.choice((1, 100, 2000)),
            session=self.draw.choice("abcdefgh"),
            block_keys=prompt[:cut],
            avoid=frozenset(failed),
            output_tokens=self.draw.choice((0, 0, 7)),
        )


def least_s(demand: Demand, workers: list[WorkerFacts]) -> float:
    """Of all pairs, and of all who do both."""
    able = [one for one in workers if one.role is Role.PREFILL and one.id not in demand.avoid]
    able = [one for one in able if one.state.most_tokens >= demand.prompt_tokens and not one.state.store_away]
    decoders = [one for one in workers if one.role is not Role.PREFILL]
    decoders = [one for one in decoders if one.id not in demand.avoid] or decoders
    found = []
    for decode in (one for one in decoders if one.state.most_tokens > demand.prompt_tokens):
        here, room = prompt_cost(demand, decode), room_s(demand, decode)
        twice = 2 if demand.begun else 1
        moved = [twice * max(room, prompt_cost(demand, one).total_s + handed_s(demand, one, decode)) for one in able]
        delayed = max(1, decode.state.sequences) if decode.state.sequences < decode.state.max_running else 0
        delayed = (delayed or decode.state.max_running) * (decode.role is Role.DECODE)
        moved.append(twice * (here.total_s + max(0.0, room - here.queue_s)) + delayed * here.compute_s)
        if decode.role is Role.BOTH or decode.state.store_away:
            moved = moved[-1:]
        found.append(min(moved) + decode_s(demand, decode))
    return min(found)


@pytest.mark.parametrize("seed", range(40))
def test_who_was_left_out_was_no_better(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(seed, workers=60)
    planner = world.planner
    compared = []

    def beside_all(model: str, demand: Demand, holdings: Holdings, facts: object) -> object:
        answer = few(model, demand, holdings, facts)
        looked_at = planner.shortlist.looked_at
        everybody = [
            planner._observer.worker(column, holdings, world.now)
            for column, seat in enumerate(planner._fleet._seats)
            if seat.member.role is not None
        ]
        best = decide(demand, everybody, Random(1), STRICT)
        assert type(answer) is type(best)
        if isinstance(answer, Decision) and isinstance(best, Decision):
            least = least_s(demand, everybody)
            assert best.chosen.cost_s == pytest.approx(least)
            assert least - 1e-9 <= answer.chosen.cost_s <= 1.02 * least
            compared.append(looked_at)
        return answer

    few = planner.shortlist.decide
    monkeypatch.setattr(planner.shortlist, "_knobs", STRICT)
    monkeypatch.setattr(planner.shortlist, "decide", beside_all)
    for number in range(20):
        planned = planner.plan(world.ask())
        if number % 2:  # the others' prompts are being computed, and later ones may wait for their blocks
            planner.release(planned.number)
    assert len(compared) == 20
