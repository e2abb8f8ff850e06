"""The section about a mesh under load for long, whose services die."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures

_LINES = (
    Line("streams_lost", "requests without their whole answer", 0),
    Line("tokens_wrong", "tokens that differ from the right answers, or are missing", 0),
    Line("leaks", "figures of services at rest that are not what they were", 0),
    Line("defects_logged", "log lines of tasks that failed or were left behind", 0),
    Line("max_pause_s", "longest time between two tokens of a stream, s"),
    Line("max_first_token_s", "longest time until a first token, s"),
    Line("memory_growth_mb", "growth of memory, of the process that grew most, MB"),
    Line("latency_last_vs_first", "latency of the last requests : of the first, both without faults"),
    Line("latency_p95_last_vs_first", "their 95th percentiles"),
    Line("requests_done", "requests", 0),
    Line("clients_left", "clients that left in the middle", 0),
    Line("faults", "faults", 0),
    Line("asked_again", "times that a client asked again, because its gateway had gone", 0),
    Line("streams_resumed", "of those, streams of which another gateway told the rest", 0),
    Line("errors_told", "errors that gateways told which were there", 0),
    Line("requests_per_s", "requests/s"),
)
_GROWTH = "memory_growth_mb_"


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    other = "" if earlier is None else f" The other run was on another machine: {earlier.machine}."
    grown = [
        Line(id, f"growth of memory, {id.removeprefix(_GROWTH)}, MB") for id in now.ids() if id.startswith(_GROWTH)
    ]
    return f"""## A long run with faults

`penstock bench soak`: a mesh of real processes with two gateways and routers, several workers, drafts, a disk tier, two
tenants, a batch and, where there is one, Redis. Clients ask for chats, text, structured output, tool calls, several
choices and turns of sessions; three of ten leave in the middle. Every few seconds a service is killed or stopped, for
less time than anybody minds, for longer than a worker may be silent, or until its supervisor kills it. A client whose
gateway has gone asks the other one for the rest. Each answer is compared with the one that the mesh gave before the
first fault. In the end nobody asks any more, and what the services hold, their descriptors, threads and tasks are
compared with what they were. Growth of memory is that of private memory in the later half of the longest life of a
process of each kind.

{figures([*_LINES, *grown], now, earlier)}

Measured on {now.machine}.{other}
"""
