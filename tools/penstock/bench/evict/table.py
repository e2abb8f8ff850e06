"""Which replays make up a table: policies by capacities, one tier and two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from penstock.bench.evict.offline import Clairvoyant, Future, Rule
from penstock.bench.evict.run import ReplayRates, Saved, TraceReplay
from penstock.kv.eviction import POLICIES, make_policy
from penstock.traces.reading import Trace

OFFLINE, HINTED = "offline", "worth, hints"
_SHARES = (1 / 64, 1 / 32, 1 / 22, 1 / 16, 1 / 11, 1 / 8, 1 / 4)
_PAIRS = ((1 / 64, 1 / 16), (1 / 64, 1 / 8), (1 / 32, 1 / 4))
_QUICK_SHARES = (1 / 32, 1 / 16, 1 / 8)
_QUICK_PAIRS = ((1 / 32, 1 / 4),)


@dataclass(frozen=True, slots=True)
class Job:
    """One replay."""

    policy: str
    """One of POLICIES, HINTED or OFFLINE."""
    capacities: tuple[int, ...]
    """Blocks in the first tier and, where there is one, the second."""


def jobs(trace: Trace, quick: bool) -> list[Job]:
    """All replays of a trace. Capacities are shares of its distinct blocks."""
    blocks = trace.blocks
    shares = [(share,) for share in (_QUICK_SHARES if quick else _SHARES)]
    sizes = [
        tuple(max(1, round(share * blocks)) for share in one) for one in (*shares, *(_QUICK_PAIRS if quick else _PAIRS))
    ]
    policies = [*POLICIES, *([HINTED] if trace.has_sessions else []), OFFLINE]
    return [Job(policy, capacities) for capacities in sizes for policy in policies]


def play(trace: Trace, todo: list[Job], rates: ReplayRates) -> Iterator[tuple[Job, Saved]]:
    """Runs them, one after the other."""
    future = Future(trace)
    for job in todo:
        yield job, (_offline(trace, future, job, rates) if job.policy == OFFLINE else _online(trace, job, rates))


def _online(trace: Trace, job: Job, rates: ReplayRates) -> Saved:
    hinted = job.policy == HINTED
    replay = TraceReplay(trace, rates, hints=hinted)
    return replay.run(job.capacities, partial(make_policy, "worth" if hinted else job.policy, replay.clock))


def _offline(trace: Trace, future: Future, job: Job, rates: ReplayRates) -> Saved:
    """The better of the two schedules; of two tiers, with all room in one.

    The latter is no bound where requests do not fit into the first tier: what is pinned then differs.
    """
    results = []
    rules: tuple[Rule, ...] = ("farthest", "seconds")
    for rule in rules:
        replay = TraceReplay(trace, rates)
        knows = partial(Clairvoyant, future, rule, rates.prefill, replay.at)
        results.append(replay.run((sum(job.capacities),), knows))
    return max(results, key=lambda saved: saved.seconds_saved)
