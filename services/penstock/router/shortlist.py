"""The few workers that are looked at for one request, and the decision among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from random import Random

import numpy as np

from penstock.router.baselines import Baseline
from penstock.router.demand import Demand, Knobs
from penstock.router.facts import Holdings
from penstock.router.fleet import Fleet, Floats, Numbers
from penstock.router.ledger import Ledger
from penstock.router.options import Answer, NoWorker, QueueFull, TooLong, Unmet, Waits
from penstock.router.policy import choose
from penstock.router.workers import WorkerFacts

_FEW = 6
_MOST_FOR_TARGET = 96
"""Workers of a kind that are looked at for a request with a target, which nobody may meet."""
_ENOUGH = 1.02
"""What those that are not looked at might be better by."""
_NO_FLOORS: Floats = np.empty(0)


@dataclass(frozen=True, slots=True)
class _Field:
    """Workers of one kind, and the least seconds that each takes."""

    columns: Numbers
    """Ascending."""
    floors: Floats

    def least(self, count: int, home: int | None) -> tuple[list[int], float]:
        """The columns of the `count` with the lowest floors and, if it is one of the field, `home`; and the lowest
        floor of the others."""
        if len(self.columns) <= count:
            return self.columns.tolist(), inf
        order = np.argpartition(self.floors, count)
        least = self.columns[order[:count]].tolist()
        if home is not None and home not in least and home in self.columns:
            least.append(home)
        return least, float(self.floors[order[count]])

    def without(self, columns: list[int]) -> _Field:
        """The others; `columns` are some of the field."""
        left = np.ones(len(self.columns), bool)
        left[np.searchsorted(self.columns, columns)] = False
        return _Field(self.columns[left], self.floors[left])


class _Looked(dict[int, WorkerFacts]):
    """What is known of those that were looked at, by column: each is looked at once."""

    def __init__(self, facts: Callable[[int], WorkerFacts]) -> None:
        self._facts = facts

    def __missing__(self, column: int) -> WorkerFacts:
        found = self[column] = self._facts(column)
        return found


class Shortlist:
    """Decides among the workers that could be best for a request, which are few however many there are."""

    def __init__(
        self, fleet: Fleet, ledger: Ledger, random: Random, knobs: Knobs, baseline: Baseline | None = None
    ) -> None:
        """A `baseline` decides instead, and looks at all."""
        self._baseline = baseline
        self._fleet = fleet
        self._ledger = ledger
        self._random = random
        self._knobs = knobs
        self.few = _FEW
        """Workers of a kind that are looked at first."""
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
        waiting = self._computing(holdings)
        prompts = _Field(able, self._prompt_floors(demand, able, waiting, holdings) if len(able) else _NO_FLOORS)
        local_s = self._prompt_floors(demand, roomy, waiting, holdings)
        if demand.first_token_s < inf:
            soon = np.minimum(local_s, prompts.floors.min(initial=inf)) <= demand.first_token_s
            if soon.any():
                roomy, local_s = roomy[soon], local_s[soon]
        answer_s = fleet.answer_floors(demand, roomy)
        if len(able):
            local_s += fleet.delay_floors(demand, roomy, holdings.placed, holdings.block_size)
            local_s = np.minimum(local_s, self._moved_s(demand, roomy, prompts, holdings))
        answers = _Field(roomy, local_s + answer_s)
        few, looked = self.few, _Looked(facts)
        while True:
            seen, other_s = answers.least(few, fleet.column(demand.home_decode))
            computing, _ = prompts.least(few, fleet.column(demand.home_prefill))
            hosts = dict.fromkeys(map(fleet.host_of, seen)) if len(able) else ()
            beside = [fleet.beside(able, prompts.floors, host) for host in hosts]
            computing = list(dict.fromkeys([*computing, *(column for column in beside if column is not None)]))
            self.looked_at = len(seen) + len(computing)
            workers = [looked[column] for column in seen], [looked[column] for column in computing]
            answer = choose(demand, *workers, self._random, self._knobs)
            if isinstance(answer, QueueFull) or len(seen) + len(computing) == len(roomy) + len(able):
                return answer
            if len(computing) < len(able):
                rest, near = prompts.without(computing), np.array(sorted(seen))
                moved_s = self._moved_s(demand, near, rest, holdings) + fleet.answer_floors(demand, near)
                other_s = min(other_s, float(moved_s.min()))
            decision = answer.decision if isinstance(answer, Waits) else answer
            if demand.has_target:
                seconds = inf if isinstance(decision, Unmet) else decision.chosen.cost_s
            else:
                assert not isinstance(decision, Unmet), "it has no target"
                seconds = min(option.cost_s for option in decision.options)
            if seconds <= _ENOUGH * other_s or (demand.has_target and few >= _MOST_FOR_TARGET):
                return answer
            few *= 4

    def _moved_s(self, demand: Demand, columns: Numbers, prompts: _Field, holdings: Holdings) -> Floats:
        """Seconds until these have the KV of a prompt that one of `prompts`, which are some, computes, at least."""
        pair = prompts.columns, prompts.floors
        return self._fleet.moved_floors(demand, columns, pair, holdings.placed, holdings.block_size)

    def _prompt_floors(self, demand: Demand, columns: Numbers, waiting: list[int], holdings: Holdings) -> Floats:
        floors = self._fleet.prompt_floors(demand, columns, holdings.placed, holdings.block_size)
        if waiting:
            rows = np.isin(columns, waiting)
            floors[rows] = self._fleet.queue_floors(columns[rows])
        return floors

    def _computing(self, holdings: Holdings) -> list[int]:
        """Columns of workers that compute blocks of the prompt for others, behind those that somebody has."""
        found: set[str] = set()
        for depth in holdings.placed.depths:
            if depth < len(holdings.keys):
                found.update(self._ledger.computing(holdings.keys[depth]))
        columns = (self._fleet.column(member) for member in found)
        return [column for column in columns if column is not None]

    def _without(self, columns: Numbers, demand: Demand, *, all_of_them: bool = True) -> Numbers:
        """Those that have not failed this request; with `all_of_them`, all when every one has."""
        if not demand.avoid:
            return columns
        failed = [column for column in map(self._fleet.column, demand.avoid) if column is not None]
        left = columns[~np.isin(columns, failed)]
        return left if len(left) or not all_of_them else columns
