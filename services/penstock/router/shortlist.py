"""The few workers that are looked at for one request, and the decision among them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from penstock.router.baselines import Baseline
from penstock.router.demand import Demand, Knobs
from penstock.router.facts import Holdings
from penstock.router.fleet import Fleet, Floats, Numbers
from penstock.router.options import Answer, Decision, NoWorker, PromptPlace, QueueFull, TooLong, Unmet, Waits
from penstock.router.policy import choose, nearly_equal, place
from penstock.router.workers import WorkerFacts

_FEWEST = 1
"""Workers of a kind that are looked at first: enough where the others have to take longer."""
_FEW = 6
"""Where they need not."""
_MOST_FOR_TARGET = 96
"""Workers of a kind that are looked at for a request with a target, which nobody may meet."""
_ENOUGH = 1.02
"""What those that are not looked at might be better by."""
_SLACK_S = 1e-3
"""Floors are at most so much above what their workers take: by a little, those with less to do of late go first."""


class _Field(NamedTuple):
    """Workers of one kind, and the least seconds that each takes."""

    columns: Numbers
    """Ascending."""
    floors: Floats
    home: int | None
    """The column of the one where the session was last; None: it is none of them."""

    def least(self, count: int) -> tuple[list[int], float]:
        """The columns of `home` and of the `count` with the lowest floors; and the lowest floor of the others."""
        columns, other_s = self.columns, inf
        if len(columns) > count:
            order = np.argpartition(self.floors, count)
            columns, other_s = columns[order[:count]], self.floors.item(order.item(count))
        least = columns.tolist()
        if self.home is not None and self.home not in least:
            least.append(self.home)
        return least, other_s

    def below(self, most_s: float) -> _Field:
        """Those whose floors are at most that."""
        low = self.floors <= most_s + _SLACK_S
        return self._replace(columns=self.columns[low], floors=self.floors[low])

    def without(self, columns: list[int]) -> _Field:
        """The others."""
        left = ~np.isin(self.columns, columns)
        return self._replace(columns=self.columns[left], floors=self.floors[left])


_NOBODY = _Field(np.empty(0, np.intp), np.empty(0), None)


class _Looked(dict[int, PromptPlace]):
    """Those that were looked at, by column: each is looked at once."""

    def __init__(self, look: Callable[[int], PromptPlace]) -> None:
        self._look = look

    def __missing__(self, column: int) -> PromptPlace:
        found = self[column] = self._look(column)
        return found


class _Race(NamedTuple):
    """One request, and who comes into question for it."""

    demand: Demand
    holdings: Holdings
    looked: _Looked
    decoders: _Field
    """Their floors are those of the whole answer."""
    prefillers: _Field
    """Those of the prompt."""
    answer_s: float
    """The floor of the answer without the prompt, at whoever has the lowest."""


class _Look(NamedTuple):
    """What a look at some of them has found."""

    answer: Decision | QueueFull | Waits | Unmet
    decoders: list[int]
    prefillers: list[int]
    other_s: float
    """The lowest floor of decoders that were not looked at."""
    other_prompt_s: float
    """Likewise of prefillers."""

    @property
    def decision(self) -> Decision | None:
        """Where the request would go."""
        answer = self.answer.decision if isinstance(self.answer, Waits) else self.answer
        return answer if isinstance(answer, Decision) else None

    @property
    def least_s(self) -> float:
        """Seconds with the best that was found."""
        decision = self.decision
        return inf if decision is None else min(option.cost_s for option in decision.options)


class Shortlist:
    """Decides among the workers that could be best for a request, which are few however many there are."""

    def __init__(self, fleet: Fleet, random: Random, knobs: Knobs, baseline: Baseline | None = None) -> None:
        """A `baseline` decides instead, and looks at all."""
        self._baseline = baseline
        self._fleet = fleet
        self._random = random
        self._knobs = knobs
        self.fewest, self.few = _FEWEST, _FEW
        """Workers of a kind that are looked at first, and where some are nearly as good as others."""
        self.looked_at = 0
        """Workers, for the last request."""

    def decide(self, model: str, demand: Demand, holdings: Holdings, facts: Callable[[int], WorkerFacts]) -> Answer:
        """The policy's answer. No worker that was not looked at would have been better by more than two hundredths; for
        a request with a target, which many may miss, that holds only as far as a bounded number is looked at."""
        fleet = self._fleet
        if self._baseline is not None:
            everybody = [*fleet.decoders(model).tolist(), *fleet.prefillers(model).tolist()]
            self.looked_at = len(everybody)
            return self._baseline.decide(demand, [facts(column) for column in everybody], self._random, self._knobs)
        decoders = self._without(fleet.decoders(model), demand)
        if not len(decoders):
            return NoWorker()
        roomy = fleet.roomy(decoders, demand.prompt_tokens + 1)
        if not len(roomy):
            return TooLong(fleet.most_room(decoders))
        able = fleet.roomy(self._without(fleet.prefillers(model), demand, all_of_them=False), demand.prompt_tokens)
        race = self._enter(demand, holdings, roomy, able, facts)
        if self.fewest < self.few and not demand.has_target:
            found = self._look(race, self.fewest)
            if isinstance(found.answer, Decision):
                bound_s = nearly_equal(found.least_s, self._knobs)
                prompt_s = bound_s - race.answer_s
                if found.other_s > bound_s and found.other_prompt_s > prompt_s:
                    moved_s = found.other_prompt_s + race.answer_s
                    return replace(found.answer, choices=len(roomy), beyond_s=min(found.other_s, moved_s))
                best_s = race.prefillers.floors.min(initial=inf)
                prefillers = race.prefillers.below(max(prompt_s, best_s))
                race = race._replace(decoders=race.decoders.below(bound_s), prefillers=prefillers)
        few = self.few
        while True:
            found = self._look(race, few)
            if (
                isinstance(found.answer, QueueFull)
                or self._enough(race, found)
                or (demand.has_target and few >= _MOST_FOR_TARGET)
            ):
                break
            few *= 4
        if isinstance(found.answer, Decision):
            return replace(found.answer, choices=len(roomy), beyond_s=found.other_s)
        return found.answer

    def _enter(
        self,
        demand: Demand,
        holdings: Holdings,
        roomy: Numbers,
        able: Numbers,
        facts: Callable[[int], WorkerFacts],
    ) -> _Race:
        """Those that could decode and those that could compute the prompt, and their floors."""
        fleet = self._fleet
        home_prefill, home_decode = fleet.column(demand.home_prefill), fleet.column(demand.home_decode)
        waiting = self._computing(holdings)
        prefillers = _NOBODY
        if len(able):
            floors = self._prompt_floors(demand, able, waiting, holdings)
            prefillers = _Field(able, floors, home_prefill if _has(able, home_prefill) else None)
        local_s = self._prompt_floors(demand, roomy, waiting, holdings)
        if demand.first_token_s < inf:
            soon = np.minimum(local_s, prefillers.floors.min(initial=inf)) <= demand.first_token_s
            if soon.any():
                roomy, local_s = roomy[soon], local_s[soon]
        answer_s, least_s = fleet.answer_floors(demand, roomy, holdings.shared_tokens), 0.0
        if len(able):
            local_s += fleet.delay_floors(demand, roomy, holdings.shared_tokens)
            least_s = float(answer_s.min())
            local_s = np.minimum(local_s, self._moved_s(demand, roomy, prefillers, holdings))
        local_s = self._with_room(demand, roomy, local_s, holdings)
        decoders = _Field(roomy, local_s + answer_s, home_decode if _has(roomy, home_decode) else None)
        looked = _Looked(lambda column: place(demand, facts(column)))
        return _Race(demand, holdings, looked, decoders, prefillers, least_s)

    def _look(self, race: _Race, few: int) -> _Look:
        """Decides among a few of each kind: those with the lowest floors, where the session was, and prefillers beside
        the decoders among them."""
        seen, other_s = race.decoders.least(few)
        computing, other_prompt_s = race.prefillers.least(few)
        if other_prompt_s < inf:
            computing = list(dict.fromkeys([*computing, *self._beside(race.prefillers, seen)]))
        self.looked_at = len(seen) + len(computing)
        roomy, able = [race.looked[column] for column in seen], [race.looked[column] for column in computing]
        answer = choose(race.demand, roomy, able, self._random, self._knobs)
        return _Look(answer, seen, computing, other_s, other_prompt_s)

    def _beside(self, prefillers: _Field, decoders: list[int]) -> list[int]:
        """The best one on the host of each decoder, where there is one."""
        hosts = dict.fromkeys(map(self._fleet.host_of, decoders))
        found = (self._fleet.beside(prefillers.columns, prefillers.floors, host) for host in hosts)
        return [column for column in found if column is not None]

    def _enough(self, race: _Race, found: _Look) -> bool:
        """Whether nobody else would have been better by much."""
        other_s, most_s = found.other_s, found.least_s
        if race.demand.has_target and found.decision is not None:
            most_s = found.decision.chosen.cost_s
        if most_s <= _ENOUGH * other_s and found.other_prompt_s < inf:
            rest, near = race.prefillers.without(found.prefillers), np.array(sorted(found.decoders))
            moved_s = self._moved_s(race.demand, near, rest, race.holdings)
            moved_s = self._with_room(race.demand, near, moved_s, race.holdings)
            answer_s = self._fleet.answer_floors(race.demand, near, race.holdings.shared_tokens)
            other_s = min(other_s, float((moved_s + answer_s).min()))
        return most_s <= _ENOUGH * other_s

    def _moved_s(self, demand: Demand, columns: Numbers, prompts: _Field, holdings: Holdings) -> Floats:
        """Seconds until these have the KV of a prompt that one of `prompts`, which are some, computes, at least."""
        pair = prompts.columns, prompts.floors
        return self._fleet.moved_floors(demand, columns, pair, holdings.placed, holdings.block_size)

    def _with_room(self, demand: Demand, columns: Numbers, floors: Floats, holdings: Holdings) -> Floats:
        """Seconds until the answer begins, at least, when the KV is there after `floors`."""
        room_s = self._fleet.room_floors(demand, columns, holdings.shared_tokens)
        return floors if room_s is None else np.maximum(floors, room_s)

    def _prompt_floors(self, demand: Demand, columns: Numbers, waiting: list[int], holdings: Holdings) -> Floats:
        floors = self._fleet.prompt_floors(demand, columns, holdings.placed, holdings.block_size)
        if waiting:
            rows = np.isin(columns, waiting)
            floors[rows] = self._fleet.queue_floors(columns[rows])
        for member, ahead in demand.closed.items():
            column = self._fleet.column(member)
            if column is not None and _has(columns, column):
                floors[columns.searchsorted(column)] += ahead.prompt_tokens / self._fleet.state(column).prefill_rate
        return floors

    def _computing(self, holdings: Holdings) -> list[int]:
        """Columns of workers that compute blocks of the prompt for others."""
        columns = {self._fleet.column(member) for _, member in holdings.computing}
        return [column for column in columns if column is not None]

    def _without(self, columns: Numbers, demand: Demand, *, all_of_them: bool = True) -> Numbers:
        """Those that have not failed this request; with `all_of_them`, all when every one has."""
        if not demand.avoid:
            return columns
        failed = [column for column in map(self._fleet.column, demand.avoid) if column is not None]
        left = columns[~np.isin(columns, failed)]
        return left if len(left) or not all_of_them else columns


def _has(columns: Numbers, column: int | None) -> bool:
    """Whether it is one of them, which ascend."""
    if column is None:
        return False
    at = int(columns.searchsorted(column))
    return at < len(columns) and columns.item(at) == column
