"""`python -m penstock.bench.evict TRACE`: one JSON object per line, first the trace, then each replay."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from cyclopts import App

from penstock.bench.evict.run import ReplayRates
from penstock.bench.evict.table import jobs, play
from penstock.traces.reading import TraceError, load
from penstock.traces.shaping import overlaid

app = App(name="replay", help="Replays recorded requests through the block table, under all eviction policies.")


@app.default
def replay(trace: Path, *, overlay: bool = False, quick: bool = False) -> int:
    """Replays a trace; with `--overlay` its sessions run at the same time, with `--quick` at fewer capacities."""
    try:
        loaded = load(trace)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    if overlay:
        if not loaded.has_sessions:
            print("it names no sessions, so nothing can be overlaid", file=sys.stderr)
            return 2
        loaded = overlaid(loaded)
    todo = jobs(loaded, quick)
    about = {"requests": len(loaded.asks), "blocks": loaded.blocks, "block_tokens": loaded.block_tokens}
    _say(trace=loaded.name, overlay=overlay, **about, sessions=loaded.has_sessions, replays=len(todo))
    for job, saved in play(loaded, todo, ReplayRates()):
        _say(trace=loaded.name, policy=job.policy, capacities=job.capacities, **asdict(saved))
    return 0


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    sys.exit(app())
