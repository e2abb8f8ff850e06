"""The section about the router's decisions."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.bench.measured.results import Line, Results, figures, table

_LINES = (
    Line("warm_decision_us_100k", "a known session's turn of 100,000 tokens, 100 workers, us", 0),
    Line("decisions_per_s_1000_workers", "requests/s of one core, 1,000 workers, prompts of 10,000 tokens", 0),
    Line("look_at_all_vs_few_1000", "a decision there, had all workers been looked at, : as it is", 1),
    *(
        Line(f"decision_us_{kind}_{workers}_{tokens}", f"{kind} session, {workers} workers, {tokens} tokens, us", 0)
        for kind in ("warm", "cold")
        for tokens in ("1k", "10k", "100k")
        for workers in (10, 100, 1000)
    ),
    Line("decision_us_warm_1000_100k_disaggregated", "warm, 1,000 workers that prefill or decode, 100k tokens, us", 0),
)


_QUALITY = (
    Line("hit_vs_infinite_min", "tokens of prompts not computed : with one cache without end, lowest", 2),
    Line("busiest_over_mean_max", "computed tokens of the busiest worker : the mean, highest", 2),
    Line("busiest_over_even_max", "the same, : the largest prompt where that is more than the mean, highest", 2),
    Line("p99_queue_vs_best_baseline_max", "p99 of the wait in queues : best other policy, highest", 2),
    Line("p99_ttft_vs_best_baseline_max", "p99 of the TTFT : best other policy, highest", 2),
    Line("p50_ttft_vs_best_baseline_max", "p50 of the TTFT : best other policy, highest", 2),
)
_SIMULATOR = (
    Line("simulator_ttft_error", "p50 or p90 of the TTFT, the worse: simulated : measured, off by", 2),
    Line("simulator_ttft_error_p50", "p50, off by", 2),
    Line("simulator_ttft_error_p90", "p90, off by", 2),
)
_ROLES = (
    Line("itl_p90_aggregated_over_disaggregated", "p90 between tokens, both : apart", 2),
    *(
        Line(f"{what}_p{percent}_{form}", f"p{percent} {name}, {form}, s", 3)
        for what, name in (("itl", "between tokens"), ("ttft", "of the long prompts' TTFT"))
        for percent in (50, 90, 99)
        for form in ("aggregated", "disaggregated")
    ),
)
_HINTS = {"both": "both", "no_name": "no name", "no_stores": "no stores", "neither": "neither"}
_SHOWN = ("hit", "busiest_over_mean", "queue_p99_s", "ttft_p50_s", "ttft_p99_s")


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    other = "" if earlier is None else f" The other run is of an earlier version: {earlier.machine}."
    return f"""## What a decision of the router costs, and how good it is

`penstock bench router`: from an ask to its plan, without messages and sockets; requests/s count what follows too, until
the plan's charge is given back, and the workers' reports. The index holds a million blocks, all workers have the system
prompt in their pages and four live plans each, and report their load and rates as often as real ones, and a turn adds
720 tokens. A new session brings the keys of its whole prompt.

{figures(_LINES, now, earlier)}
{_policies(now)}{_hinted(now)}{_simulator(now)}{_roles(now)}
Measured on {now.machine}.{other}
"""


def _policies(now: Results) -> str:
    cases = [*_cases(now)]
    if not cases:
        return ""
    sizes = " and ".join(sorted({case[1] for case in _names(now)}, key=int))
    return f"""
Policies on the recorded workloads in `loadtest/traces`, some with a common prompt of 4,096 tokens in front (named so),
before {sizes} modelled prefill workers which would compute for seven tenths of the time if nothing were
computed twice and answers took no time, and as many that decode as hold the answers' context in seven tenths of their
room (`penstock simulate` says how workers are modelled). Sessions run side by side and send nothing before they have
their last answer, 2,500 requests before 8 workers and 8,000 before 64; the first third of their time fills the caches
and is left out. As their answers do take time, their prompts keep the workers busy for less than that. Requests without
sessions come eight times at once before 64 workers. The halves of the workloads that a policy may be tuned on
are not among these. A wait counts wherever it is: in the router's line, in a worker's queue, for room for KV
before the prompt or behind it; TTFT is told with that last one. The time is made up, so the figures are the
same on any machine:

{figures(_QUALITY, now, None)}

| workload, prefill workers | policy | hit | busiest : mean | queue p99, s | TTFT p50, s | p99, s |
| --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(cases)}
"""


def _hinted(now: Results) -> str:
    rows = [*_hints(now)]
    if not rows:
        return ""
    heads = ["workload", "turn", *(f"{name}: hit, TTFT" for name in _HINTS.values())]
    return f"""
What a session's name (the affinity header) and the stores are worth to our policy on the same workloads, where they
tell sessions, before 8 modelled prefill workers: the part of the prompts' tokens that was not computed, and the median
TTFT in seconds, with the wait for room behind it:

{table(heads, rows)}
"""


def _hints(now: Results) -> Iterator[list[str]]:
    for id in now.ids():
        kind, *rest = id.split("|")
        if kind == "hint" and rest[1] == "both" and rest[-1] == "hit":
            trace, _, turn, _ = rest
            cells = []
            for variant in _HINTS:
                one = f"hint|{trace}|{variant}|{turn}"
                cells.append(f"{now.number(f'{one}|hit', 3)}, {now.number(f'{one}|ttft_p50_s', 3)}")
            yield [trace, turn.replace("_", " "), *cells]


def _simulator(now: Results) -> str:
    if not now.has(_SIMULATOR[0].id):
        return ""
    return f"""
The simulator beside a real mesh, of the 135M shape with random weights, under the same requests; the rates of its
worker were measured from outside right before and after them:

{figures(_SIMULATOR, now, None)}
{now.elsewhere(_SIMULATOR[0].id)}"""


def _roles(now: Results) -> str:
    if not now.has(_ROLES[0].id):
        return ""
    return f"""
Two workers that do both beside one that prefills and one that decodes, of the same shape and on the same cores, while
long prompts come beside four streams:

{figures(_ROLES, now, None)}
{now.elsewhere(_ROLES[0].id)}"""


def _names(now: Results) -> Iterator[tuple[str, str, str]]:
    """Policy, workers and workload of each simulation."""
    for id in now.ids():
        policy, *rest = id.split("|")
        if policy != "hint" and rest and rest[-1] == "hit":
            workers, trace, _ = rest
            yield policy, workers, trace


def _cases(now: Results) -> Iterator[str]:
    for policy, workers, trace in _names(now):
        values = (now.number(f"{policy}|{workers}|{trace}|{what}", 2) for what in _SHOWN)
        yield f"| {trace}, {workers} | {policy} | {' | '.join(values)} |"
