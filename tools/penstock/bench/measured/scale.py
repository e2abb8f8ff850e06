"""The section about the planner: `penstock bench scale`."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures, table

_TIME, _MET = "planner_worker_time_vs_static", "planner_slo_attainment"
_WORDS = {_TIME: "worker time, planner : best static split", _MET: "requests within their targets, planner : static"}


def section(now: Results, _: Results | None = None) -> str:
    """In Markdown."""
    names = [id.removeprefix(f"{_TIME}_") for id in now.ids() if id.startswith(f"{_TIME}_")]
    lines = [Line(id, f"{words}, all workloads", 3) for id, words in _WORDS.items()]
    lines += [Line(f"{id}_{name}", f"{words}: {name}", 3) for name in names for id, words in _WORDS.items()]
    heads = ["workload", "static", "planner", "utilisation", "unseen", "at once"]
    heads += ["workers: static", "planner", "utilisation", "busy"]
    rows = [
        [
            name,
            *(f"{100 * (now.value(f'{who}_met_{name}') or 0):.1f} %" for who in ("static", "planner", "utilisation")),
            *(
                f"{100 * met:.1f} %" if (met := now.value(f"{id}_{name}")) else ""
                for id in ("planner_met_unseen", "at_once_met")
            ),
            now.number(f"static_workers_{name}", 0),
            *(now.number(f"{who}_workers_{name}", 2) for who in ("planner", "utilisation")),
            now.number(f"busy_workers_{name}", 2),
        ]
        for name in names
    ]
    return f"""## Scaling

`penstock bench scale`: the planner of `penstock scale` before modelled workers that take 20 s to start, beside the
fewest workers of fixed roles with which 95 % of the requests meet their targets (found by search, with the best split
of these), and beside a horizontal autoscaler by utilisation for each role. The planner begins with one worker of each
role; starting and draining is worker time too. *square* is a load that is eight times as much for five of ten minutes,
*seesaw* one whose prompts and answers are long by turns; of both the first two periods, in which nothing can be
foreseen, are told apart. The others are recorded.

{figures(lines, now)}

Requests within their targets, and workers in the mean. *at once* is what is possible if as many workers as there may be
are ordered at the first look, and *busy* are the workers that the work alone keeps busy, were each prompt computed once
and every batch full all the time: no planner does better than these.

{table(heads, rows)}

Measured on {now.machine}.
"""
