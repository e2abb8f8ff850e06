"""The section about first requests after a rest: `penstock bench e2e --cells rest`."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures, table

_RATIO = "agent_turn1_ttft_after_rest_vs_best"
_BEFORE, _AFTER = "time_to_first_token_before_rest", "time_to_first_token_after_rest"


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    begin, end = "rest_135m_", f"_{_BEFORE}"
    servers = [id.removeprefix(begin).removesuffix(end) for id in now.ids() if id.endswith(end)]
    rows = [[server, *(now.rate(f"{begin}{server}_{what}") for what in (_BEFORE, _AFTER))] for server in servers]
    other = "" if earlier is None else f" The other run: {earlier.machine}."
    return f"""## After a rest

First turns of two agents that have nothing in common, 1,350 tokens each: one at once, and one after nobody has asked
for two minutes.

```
penstock bench e2e --cells rest --json > rest.json
```

{figures([Line(_RATIO, "TTFT after the rest, ours : the best peer's")], now, earlier)}

{table(["server", "TTFT before the rest, ms", "after it"], rows)}

Measured on {now.machine}.{other}
"""
