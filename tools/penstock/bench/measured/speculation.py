"""The section about drafts."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures, table

_TOKENS = "tokens_per_step_"
_KNOWN = {"_prompt": "its own text", "_session": "and its session's", "": "and its tenant's outputs"}


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    other = "" if earlier is None else f" The earlier run: {earlier.machine}."
    names = [id.removeprefix(_TOKENS).removesuffix("_prompt") for id in now.ids() if id.endswith("_prompt")]
    traces = [*dict.fromkeys(name for name in names if now.has(f"{_TOKENS}{name}"))]
    lines = [Line(f"{_TOKENS}{name}", f"tokens of a verify step, guesses by lookup, {name}") for name in traces]
    parts = ("tokens_per_step", "drafted_per_step", "accepted_share", "lookup_us")
    rows = [
        [f"{name}, {_KNOWN[end]}", *(now.number(f"{part}_{name}{end}") for part in parts)]
        for name in traces
        for end in _KNOWN
    ]
    return f"""## What drafts are worth

`penstock bench speculation`: recorded sessions of agents, decoded greedily. What was recorded is what the model says; a
step keeps the longest right beginning of a guess, and one token more. Tokens are those of the embedded model, which has
4,096 of them. The chances of guesses were fitted to the same recordings.

{figures(lines, now, earlier)}

{table(["trace, and what guesses are made from", "tokens", "drafted", "of these right", "lookup, us a step"], rows)}

Measured on {now.machine}.{other}
"""
