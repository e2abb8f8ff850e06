"""The router's policies on recorded workloads, before modelled workers: hit rate, balance, and what requests wait."""

from __future__ import annotations

import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import ceil, inf
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

from penstock.bench.harness import Figure, figure
from penstock.router.baselines import PolicyName
from penstock.router.workers import StepCost
from penstock.simulator.simulation import SimulatedMesh, Simulation
from penstock.simulator.workers import WorkerModel
from penstock.traces.reading import Trace, load
from penstock.traces.shaping import (
    coarser,
    copied,
    crowded,
    half,
    new_tokens,
    paced,
    session_seconds,
    with_common_prompt,
)

TRACES = Path(__file__).parents[4] / "loadtest" / "traces"
OURS: PolicyName = "seconds"
_COMMON_TOKENS = 4096
"""Of the system prompt and tools that every prompt of a trace also gets in front."""
_LOAD = 0.7
"""The part of the time in which prefill workers compute, if nothing is computed twice; and the part of the decode
workers' room for KV that is taken in the mean."""
_STORE_TOKENS = 3_200_000
"""Of each host's store."""
_DECODES = 4
"""Prefill workers for one that decodes, at most: as many decode as hold the context of all answers."""
MODEL = WorkerModel(
    prefill_rate=8_000.0,
    chunk_tokens=2048,
    step=StepCost(0.02, 0.0001, 1e-8),
    max_running=4096,
    kv_tokens=1_000_000,
    fetch_rate=2e10,
    remote_rate=5e9,
)
"""A worker with a GPU and a model of eight billion parameters."""
_TOKEN_BYTES = 131_072
_HINT_WORKERS = 8
HINTS: Mapping[str, tuple[bool, bool]] = {
    "both": (True, True),
    "no_name": (False, True),
    "no_stores": (True, False),
    "neither": (False, False),
}
"""Whether sessions are named, and whether there are stores."""
TURNS: Mapping[str, tuple[int, float]] = {
    "all": (1, inf),
    "1": (1, 1),
    "2": (2, 2),
    "3_to_10": (3, 10),
    "later": (11, inf),
}
_LEAST_S = 0.01
"""Baselines that wait less count as waiting so long."""
_BLOCK = 256
"""Blocks of traces that have smaller ones are joined, which makes simulations faster."""
_REQUESTS = {8: 2500, 64: 8000}
"""Of traces whose sessions can be begun again, by prefill workers."""
_GENERATIONS = 1.5
"""As many sessions run at once as make so many requests to be served by each of them in turn: the first one fills the
caches, the others count."""
_EIGHT = 8
"""So many prefill workers share the requests of a trace without sessions; others have a copy of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """One simulation, by name."""

    trace: str
    workers: int
    policy: PolicyName
    hit: float
    """Of what one cache without end would have had."""
    busiest_over_mean: float
    busiest_over_even: float
    """As well as anybody could: the mean, or the tokens of the largest prompt where they are more."""
    queue_p50_s: float
    """Of all waits: in the router's line, in workers' queues, and for room for KV, before the first token or behind
    it."""
    queue_p99_s: float
    ttft_p50_s: float
    """With the wait for room that comes behind the first token."""
    ttft_p99_s: float


def policy_runs(paths: Iterable[Path], sizes: Sequence[int], quick: bool) -> list[PolicyRun]:
    """All policies on all traces, with and without a common prompt, before meshes of these numbers of prefill workers,
    in as many processes as there are cores for this one."""
    chosen: tuple[PolicyName, ...] = (OURS, "least-tokens") if quick else get_args(PolicyName)
    cases = [(path, common) for path in paths for common in ((False,) if quick else (False, True))]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        runs = [
            pool.submit(policy_run, path, common, workers, policy, quick=quick)
            for path, common in cases
            for workers in sizes
            for policy in chosen
        ]
        return [_told(run.result()) for run in runs]


def _told(run: PolicyRun) -> PolicyRun:
    print(f"{run.trace}, {run.workers} workers, {run.policy}: p99 of the TTFT {run.ttft_p99_s:.3g} s", file=sys.stderr)
    return run


def policy_run(path: Path, common: bool, workers: int, policy: PolicyName, **how: bool) -> PolicyRun:
    """One simulation; `how` as in `shaped`."""
    trace, since = shaped(path, common, workers, **how)
    result = Simulation(_mesh(trace, workers, policy), trace, since).run()
    pairs = zip(trace.asks, new_tokens(trace), strict=True)
    largest = max(tokens for ask, tokens in pairs if ask.at >= since)
    mean = sum(result.computed) / len(result.computed)
    return PolicyRun(
        trace=trace.name,
        workers=workers,
        policy=policy,
        hit=result.hit / result.reusable if result.reusable else 1.0,
        busiest_over_mean=result.busiest_over_mean,
        busiest_over_even=max(result.computed) / max(mean, largest),
        queue_p50_s=result.percentile(lambda one: one.waited_s, 0.5),
        queue_p99_s=result.percentile(lambda one: one.waited_s, 0.99),
        ttft_p50_s=result.percentile(lambda one: one.started_s, 0.5),
        ttft_p99_s=result.percentile(lambda one: one.started_s, 0.99),
    )


def _mesh(trace: Trace, workers: int, policy: PolicyName) -> SimulatedMesh:
    return SimulatedMesh(
        prefill=workers,
        decode=max(1, workers // _DECODES, _decoders(trace)),
        store_blocks=_STORE_TOKENS // trace.block_tokens,
        token_bytes=_TOKEN_BYTES,
        max_queue_s=1e9,
        in_turn=True,
        policy=policy,
        model=MODEL,
    )


def _decoders(trace: Trace) -> int:
    """So many workers hold the context of all answers that are generated at once, by Little's law."""
    room = _LOAD * MODEL.kv_tokens
    mean = sum(ask.tokens + ask.output for ask in trace.asks) / len(trace.asks)
    step_s = MODEL.step.seconds(room / mean, room)
    held = sum((ask.tokens + ask.output) * ask.output * step_s for ask in trace.asks) / trace.asks[-1].at
    return ceil(held / room)


def hint_runs(paths: Iterable[Path], quick: bool) -> list[Figure]:
    """What the session's name and the stores are worth to our policy, on workloads that tell sessions, by turn; in as
    many processes as there are cores for this one."""
    told = [path for path in paths if load(path).has_sessions]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(hint_run, path, variant, quick=quick) for path in told for variant in HINTS]
        return [figure for run in runs for figure in run.result()]


def hint_run(path: Path, variant: str, *, quick: bool) -> list[Figure]:
    """One simulation: hits, and TTFT with the wait for room behind it, of all turns and of some."""
    trace, since = shaped(path, False, _HINT_WORKERS, quick=quick)
    names, stores = HINTS[variant]
    mesh = replace(_mesh(trace, _HINT_WORKERS, OURS), names=names)
    if not stores:
        mesh = replace(mesh, store_blocks=0)
    result = Simulation(mesh, trace, since).run()
    seen: Counter[str] = Counter()
    turns = []
    for ask in trace.asks:
        seen[ask.session] += 1
        if ask.at >= since:
            turns.append(seen[ask.session])
    served = list(zip(turns, result.requests, strict=True))
    found = []
    for name, (first, last) in TURNS.items():
        some = [one for turn, one in served if first <= turn <= last and not one.refused]
        if some:
            hit = sum(one.cached for one in some) / sum(one.tokens for one in some)
            id = f"hint|{trace.name}|{variant}|{name}"
            found.append(figure(f"{id}|hit", [hit], "ratio", "all prompt tokens"))
            ttft_s = statistics.median(one.started_s for one in some)
            found.append(figure(f"{id}|ttft_p50_s", [ttft_s], "s", "modelled workers"))
    return found


def shaped(path: Path, common: bool, workers: int, *, quick: bool = False, second: bool = True) -> tuple[Trace, float]:
    """The second half of a trace, so dense that it keeps so many prefill workers busy for `_LOAD` of the time, and when
    that begins: sessions at once, each at its own pace or faster, or requests without sessions faster and several times
    at once. The first half is for whoever tunes a policy."""
    trace = coarser(half(load(path), second=second), _BLOCK)
    requests = 40 if quick else _REQUESTS[min(_REQUESTS, key=lambda size: abs(size - workers))]
    if not trace.has_sessions:
        trace = copied(trace, 1 if quick else max(1, workers // _EIGHT))
    if common:
        trace = with_common_prompt(trace, _COMMON_TOKENS)
    busy_s = sum(new_tokens(trace)) / MODEL.prefill_rate / _LOAD
    if not trace.has_sessions:
        return paced(trace, busy_s / workers), 0.0
    sessions = len({ask.session for ask in trace.asks})
    own_pace = workers * session_seconds(trace) / busy_s
    at_once = min(own_pace, max(1.0, requests / _GENERATIONS / (len(trace.asks) / sessions)))
    trace = crowded(paced(trace, trace.asks[-1].at * at_once / own_pace), at_once, requests)
    return trace, trace.asks[-1].at * (1 - 1 / _GENERATIONS)


def policy_figures(runs: Sequence[PolicyRun]) -> list[Figure]:
    """The worst of ours over all cases, with the goals; then every policy in every case."""
    ours = [run for run in runs if run.policy == OURS]
    hit, busiest = min(run.hit for run in ours), max(run.busiest_over_mean for run in ours)
    even = max(run.busiest_over_even for run in ours)
    lead = [
        figure("hit_vs_infinite_min", [hit], "ratio", "one cache without end", 0.9),
        figure("busiest_over_mean_max", [busiest], "ratio", "mean worker", 1.1, lower_is_better=True),
        figure("busiest_over_even_max", [even], "ratio", "the mean or the largest prompt", lower_is_better=True),
    ]
    for id, what, goal in (
        ("p99_queue_vs_best_baseline_max", "queue_p99_s", 0.8),
        ("p99_ttft_vs_best_baseline_max", "ttft_p99_s", None),
        ("p50_ttft_vs_best_baseline_max", "ttft_p50_s", None),
    ):
        worst = max(getattr(run, what) / max(_LEAST_S, _best_other(runs, run, what)) for run in ours)
        lead.append(figure(id, [worst], "ratio", "best other policy in each case", goal, lower_is_better=True))
    return lead + [each for run in runs for each in _figures_of(run)]


def _figures_of(run: PolicyRun) -> Iterator[Figure]:
    for what, value in asdict(run).items():
        if isinstance(value, float):
            id = f"{run.policy}|{run.workers}|{run.trace}|{what}"
            yield figure(id, [value], "s" if what.endswith("_s") else "ratio", "modelled workers")


def _best_other(runs: Sequence[PolicyRun], ours: PolicyRun, what: str) -> float:
    case = (ours.trace, ours.workers)
    return float(min(getattr(run, what) for run in runs if (run.trace, run.workers) == case and run.policy != OURS))
