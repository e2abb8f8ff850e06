"""The command line of the simulator."""

from __future__ import annotations

import itertools
import json as jsonlib
import statistics
import sys
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from cyclopts import App
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from penstock.router.baselines import PolicyName
from penstock.router.workers import StepCost
from penstock.simulator.capacity import CapacitySearch, Slo, Tried
from penstock.simulator.plot import PlotError
from penstock.simulator.plot import plot as draw
from penstock.simulator.rates import RatesError, read_rates
from penstock.simulator.simulation import SimulatedMesh, Simulation, SimulationResult
from penstock.simulator.sites import PLACES, SitesSimulation, days, way_s
from penstock.simulator.workers import WorkerModel
from penstock.traces.reading import Trace, TraceError, load
from penstock.traces.shaping import overlaid

app = App(name="simulate", help="Recorded requests before a modelled mesh, with the router's own code.")
_BLOCK = 512
"""Tokens of a block of simulated sites."""
_PARTS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@app.default
def simulate(
    trace: Path,
    *,
    prefill: int = 0,
    decode: int = 0,
    both: int = 0,
    policy: PolicyName = "seconds",
    per_host: int = 1,
    store_blocks: int = 6_250,
    rates: Path | None = None,
    prefill_rate: float | None = None,
    prefill_context_s: float | None = None,
    step_base_s: float | None = None,
    step_sequence_s: float | None = None,
    step_token_s: float | None = None,
    max_running: int = 64,
    kv_tokens: int = 1_000_000,
    max_queue_s: float = 120.0,
    token_bytes: int = 23_040,
    fetch_rate: float | None = None,
    remote_rate: float = 2e8,
    slo_ttft: float = 0.0,
    slo_itl: float = 0.0,
    overlay: bool = False,
    plan: float = 0.0,
    plan_most: int = 256,
    plot: Path | None = None,
    json: bool = False,
) -> int:
    """Serves a recorded workload with the router's own policy, index and ledger, before modelled workers.

    Parameters
    ----------
    trace:
        JSON lines with hash_ids (as Mooncake publishes them) or with input and output; may be gzipped.
    prefill:
        Workers that only compute prompts.
    decode:
        Workers that generate.
    both:
        Workers that do both; 8 if no workers are named.
    policy:
        As the router's --policy.
    per_host:
        Workers of one host, which share a store.
    store_blocks:
        Blocks of the trace that the store of a host holds.
    rates:
        What `penstock bench router --part simulator --json` printed: the rates that it measured take the place of the
        defaults of --prefill-rate, --prefill-context-s, --step-base-s, --step-sequence-s, --step-token-s, --fetch-rate.
    prefill_rate:
        Tokens of prompts that a worker computes per second, with no context before them. Default: 5,000.
    prefill_context_s:
        What each token of the context before it adds to a token of a prompt. Default: 0.
    step_base_s:
        Seconds of a decoding step, however little there is to do. Default: 0.02.
    step_sequence_s:
        What each sequence adds. Default: 0.0003.
    step_token_s:
        What each token of their context adds. Default: 2e-8.
    max_running:
        Sequences in one batch of a worker.
    kv_tokens:
        Tokens of context that a worker holds.
    max_queue_s:
        A request that would wait longer is refused.
    token_bytes:
        Of the KV of one token.
    fetch_rate:
        Bytes per second from the store of a worker's host. Default: 1e9.
    remote_rate:
        Likewise from another host's store.
    slo_ttft:
        Seconds to the first token at most, to count a request as good; 0: any.
    slo_itl:
        Seconds between tokens at most, in the mean, likewise.
    overlay:
        The trace's sessions run at the same time, instead of one after the other.
    plan:
        Find the fewest workers, and their roles, at which this part of the requests, such as 0.99, meets --slo-ttft and
        --slo-itl, instead of simulating the named ones.
    plan_most:
        Workers at most, of such a search.
    plot:
        Draw how TTFT and ITL are distributed to this file, such as a.png or a.svg.
    json:
        Print one JSON object and nothing else.
    """
    try:
        worker = WorkerModel() if rates is None else read_rates(rates)
    except RatesError as error:
        print(f"penstock simulate: --rates {rates}: {error}", file=sys.stderr)
        return 2
    try:
        loaded = load(trace)
    except TraceError as error:
        print(f"penstock simulate: {trace}: {error}", file=sys.stderr)
        return 2
    mesh = SimulatedMesh(
        prefill=prefill,
        decode=decode,
        both=both or (0 if prefill or decode else 8),
        per_host=per_host,
        store_blocks=store_blocks,
        token_bytes=token_bytes,
        max_queue_s=max_queue_s,
        policy=policy,
        model=replace(
            worker,
            prefill_rate=_given(prefill_rate, worker.prefill_rate),
            prefill_context_s=_given(prefill_context_s, worker.prefill_context_s),
            step=StepCost(
                _given(step_base_s, worker.step.base_s),
                _given(step_sequence_s, worker.step.sequence_s),
                _given(step_token_s, worker.step.token_s),
            ),
            max_running=max_running,
            kv_tokens=kv_tokens,
            fetch_rate=_given(fetch_rate, worker.fetch_rate),
            remote_rate=remote_rate,
        ),
    )
    if not (mesh.decode or mesh.both):
        print("penstock simulate: --decode or --both must be at least 1: nobody generates", file=sys.stderr)
        return 2
    if mesh.model.step.base_s <= 0 and mesh.model.step.sequence_s <= 0:
        print("penstock simulate: --step-base-s or --step-sequence-s must be above 0: steps take time", file=sys.stderr)
        return 2
    slo = Slo(ttft_s=slo_ttft, itl_s=slo_itl)
    if plan and not (0 < plan <= 1 and (slo_ttft or slo_itl)):
        print("penstock simulate: --plan is a part of 1 and needs --slo-ttft or --slo-itl", file=sys.stderr)
        return 2
    loaded = overlaid(loaded) if overlay and loaded.has_sessions else loaded
    if plan:
        search = CapacitySearch(mesh, plan, partial(_share, loaded, slo, quiet=json), plan_most)
        best = search.run()
        _show_search(search, best, loaded.name, as_json=json)
        if best is None:
            return 1
        mesh = best.mesh
    result = _simulated(loaded, mesh, quiet=json)
    found = summary(result, slo)
    if not plan and json:
        print(jsonlib.dumps({"trace": loaded.name, "policy": policy, **found}))
    elif not json:
        _show(found)
    if plot is not None:
        try:
            draw(result, f"{loaded.name}: {_named(mesh)}, {policy}", plot)
        except PlotError as error:
            print(f"penstock simulate: --plot {plot}: {error}", file=sys.stderr)
            return 2
    return 0


@app.command
def sites(
    *,
    place: tuple[str, ...] = ("tokyo", "frankfurt", "virginia"),
    workers: int = 2,
    sessions: tuple[int, ...] = (120, 200, 300),
    day_s: float = 2400.0,
    spill_s: float = 1.0,
    seed: int = 1,
    json: bool = False,
) -> int:
    """A day of agents at several sites, each by itself and together (docs/regions.md), before modelled workers.

    Parameters
    ----------
    place:
        Where the sites are, once for each.
    workers:
        Workers of each site; each computes prompts and generates.
    sessions:
        Sessions of each site in a day; given again for another row.
    day_s:
        Seconds of the simulated day, into which 24 hours are squeezed.
    spill_s:
        As the gateway's --spill-s.
    seed:
        Of the sessions.
    json:
        Print one JSON object and nothing else.
    """
    unknown = [name for name in place if name not in PLACES]
    if unknown or len(set(place)) < 2:
        print(f"penstock simulate sites: --place must be two or more of {', '.join(PLACES)}", file=sys.stderr)
        return 2
    rows = []
    for count in sessions:
        asks = days(place, sessions=count, day_s=day_s, block_tokens=_BLOCK, seed=seed)
        for name, most_s in (("apart", inf), ("together", spill_s)):
            meshes = {one: SimulatedMesh(both=workers) for one in place}
            result = SitesSimulation(meshes, _BLOCK, spill_s=most_s).run(asks)
            rows.append(
                {
                    "sessions": count,
                    "sites": name,
                    "requests": len(result.all),
                    **{f"started_s_{which}": result.percentile(part) for which, part in _PARTS.items()},
                    "hit": result.hit,
                    "elsewhere": sum(result.spilled.values()),
                    "refused": sum(one.refused for one in result.all),
                }
            )
    if json:
        ways = {f"{one}-{two}": way_s(one, two) for one, two in itertools.combinations(place, 2)}
        print(jsonlib.dumps({"ways_s": ways, "rows": rows}))
        return 0
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else f"{value}" for value in row.values()))
    Console().print(table)
    return 0


def _given(option: float | None, otherwise: float) -> float:
    return otherwise if option is None else option


def _simulated(trace: Trace, mesh: SimulatedMesh, *, quiet: bool) -> SimulationResult:
    console = Console(stderr=True)
    with Progress(console=console, disable=quiet or not console.is_terminal, transient=True) as bar:
        task = bar.add_task(f"{trace.name}, {_named(mesh)}", total=len(trace.asks))
        return Simulation(mesh, trace).run(lambda: bar.advance(task))


def _share(trace: Trace, slo: Slo, mesh: SimulatedMesh, *, quiet: bool) -> float:
    return slo.share(_simulated(trace, mesh, quiet=quiet))


def _named(mesh: SimulatedMesh) -> str:
    return f"{mesh.both} both" if mesh.both else f"{mesh.prefill} prefill, {mesh.decode} decode"


def _show_search(search: CapacitySearch, best: Tried | None, name: str, *, as_json: bool) -> None:
    if as_json:
        rows = [_row(one) for one in search.tried]
        print(jsonlib.dumps({"trace": name, "best": best and _row(best), "tried": rows}))
        return
    table = Table("workers", "roles", "within the targets")
    for one in sorted(search.tried, key=lambda one: (one.workers, one.good)):
        table.add_row(f"{one.workers}", _named(one.mesh), f"{one.good:.2%}")
    Console().print(table)
    print(f"enough: {_named(best.mesh)}" if best else "not enough: more than --plan-most")


def _row(one: Tried) -> dict[str, float]:
    return {"prefill": one.mesh.prefill, "decode": one.mesh.decode, "both": one.mesh.both, "good": one.good}


def summary(result: SimulationResult, slo: Slo | None = None) -> dict[str, float]:
    """The figures of a run: waits wherever they are, TTFT as clients see it, and how long it takes until tokens follow
    each other, in which the wait for room behind the first token counts too."""
    found: dict[str, float] = {
        "requests": len(result.requests),
        "refused": sum(one.refused for one in result.requests),
        "good": sum(map((slo or Slo()).met, result.requests)),
        "hit": result.hit,
        "hit_vs_infinite": result.hit / result.reusable if result.reusable else 1.0,
        "busiest_over_mean": result.busiest_over_mean,
        "decision_us": 1e6 * statistics.median(result.decision_s),
    }
    for name, part in _PARTS.items():
        found[f"waited_s_{name}"] = result.percentile(lambda one: one.waited_s, part)
        found[f"ttft_s_{name}"] = result.percentile(lambda one: one.ttft_s, part)
        found[f"started_s_{name}"] = result.percentile(lambda one: one.started_s, part)
        found[f"itl_s_{name}"] = result.percentile(lambda one: one.itl_s, part)
    return found


def _show(found: dict[str, float]) -> None:
    table = Table("figure", "value")
    for name, value in found.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)
