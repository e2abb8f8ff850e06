"""What was weighed when recent plans were made, for people who ask why a request went where it went."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter

from penstock.router.options import Option
from penstock.router.plans import Planned
from penstock.rpc.bounds import check_count, check_name
from penstock.v1 import router_pb2

_MOST_OPTIONS = 8
"""Of each plan, the chosen one among them."""
_MOST_ASKED = 256


@dataclass(frozen=True, slots=True)
class WeighedPlan:
    """A plan and what else there was to choose."""

    made_at: float
    options: Sequence[Option]
    """The chosen one first, then the cheapest others."""
    looked_at: int
    choices: int
    sources: Sequence[str]


class RecentPlans:
    """The last ones, by their names."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        """Keeps `most` of them."""
        self._most = most
        self._clock = clock
        self._plans: OrderedDict[str, WeighedPlan] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, name: str, planned: Planned) -> None:
        """Remembers a plan; the oldest one makes room."""
        decision = planned.decision
        others = [option for option in decision.options if option is not decision.chosen]
        if len(others) >= _MOST_OPTIONS:
            others = nsmallest(_MOST_OPTIONS - 1, others, key=attrgetter("cost_s"))
        else:
            others.sort(key=attrgetter("cost_s"))
        self._plans[name] = WeighedPlan(
            made_at=self._clock(),
            options=(decision.chosen, *others),
            looked_at=len(decision.options),
            choices=decision.choices,
            sources=planned.prefill_sources if planned.prefill else planned.decode_sources,
        )
        while len(self._plans) > self._most:
            self._plans.popitem(last=False)

    def found(self, request: router_pb2.PlansRequest) -> router_pb2.PlansResponse:
        """Those of the named plans that are remembered. Raises InvalidRequest."""
        check_count("plans", request.plans, _MOST_ASKED)
        for name in request.plans:
            check_name("plans", name)
        found = [(name, plan) for name in request.plans if (plan := self._plans.get(name)) is not None]
        return router_pb2.PlansResponse(
            plans=[self._told(name, plan) for name, plan in found], kept=len(self._plans), most=self._most
        )

    def _told(self, name: str, plan: WeighedPlan) -> router_pb2.PlanRecord:
        return router_pb2.PlanRecord(
            plan=name,
            age_s=self._clock() - plan.made_at,
            options=map(_option, plan.options),
            looked_at=plan.looked_at,
            choices=plan.choices,
            sources=plan.sources,
        )


def _option(option: Option) -> router_pb2.PlanOption:
    prompt, known = option.prompt, option.prompt.known
    return router_pb2.PlanOption(
        prefill=option.prefill.id if option.prefill else "",
        decode=option.decode.id,
        total_s=option.total_s,
        queue_s=prompt.queue_s,
        ahead_s=prompt.ahead_s,
        compute_s=prompt.compute_s,
        fetch_s=prompt.fetch_s,
        pull_s=prompt.pull_s,
        penalty_s=prompt.penalty_s,
        handoff_s=option.handoff_s,
        room_s=option.room_s,
        decode_s=option.answer_s,
        others_s=option.others_s,
        resident_tokens=known.resident,
        store_tokens=known.fetched,
        awaited_tokens=known.awaited,
        remote_tokens=known.remote,
        uncached_tokens=prompt.uncached_tokens,
    )
