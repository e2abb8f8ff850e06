"""The section about deaths in the middle of streams."""

from __future__ import annotations

from penstock.bench.failover.kinds import ALONE, KINDS, SERVICES
from penstock.bench.measured.results import Line, Results, figures

_WORDS = {"kill": "killed (SIGKILL)", "stop": "stopped (SIGSTOP), its connections stand"}
_PARTS = {
    "noticed": "until the gateway has given it up",
    "planned": "until there is another plan",
    "resumed": "until the client has the next token",
}
_LINES = (
    Line("streams_lost", "streams that ended with an error", 0),
    Line("tokens_wrong", "tokens that differ from those of an unbroken run, or are missing", 0),
    Line("gap_s_max_kill", "longest gap of all when a service is killed, s"),
    Line("gap_s_max_stop", "longest gap of all when a service is stopped, s"),
    Line("gap_s_nobody", "nobody dies, s"),
    *(Line(f"gap_s_{kind}_{service}", f"{service} is {_WORDS[kind]}, s") for kind in KINDS for service in SERVICES),
    *(
        Line(f"{part}_s_{kind}_decode", f"of that, when a decode worker is {_WORDS[kind].split(',')[0]}: {word}, s")
        for kind in KINDS
        for part, word in _PARTS.items()
    ),
    Line(f"gap_s_kill_{ALONE}", "the only decode worker is killed and started again, s"),
)


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    other = "" if earlier is None else f" The other run was on another machine: {earlier.machine}."
    return f"""## What a death costs a stream

`penstock bench failover`: a mesh of real processes with two decode workers and one of everything else; four streams of
the official client run when a service dies: a decode worker that serves one of them, the prefill worker while it
computes their prompts. A gap is the longest wait for an event in the streams that the death struck, also where it began
before; without a death it is the wait for the first token. Each answer is compared with that of a mesh in which nobody
died. The last row is a mesh whose only decode worker dies: its streams wait until its supervisor has started it again.

{figures(_LINES, now, earlier)}

Measured on {now.machine}.{other}
"""
