"""The command line of the benches."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from cyclopts import App

from penstock.bench.harness import BenchReport, show

app = App(name="bench", help="Measure, beside a peer or a limit in the same run.")


def _run(
    bench: Callable[[bool], Coroutine[Any, Any, BenchReport]],
    json: bool,
    quick: bool,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        show(runner.run(bench(quick)), json)


@app.command
def overhead(*, json: bool = False, quick: bool = False) -> None:
    """The whole mesh beside the same engine driven in one process: TTFT and tokens/s, 1 and 8 streams."""
    from penstock.bench.overhead import measure

    _run(measure, json, quick)


@app.command
def engine(*, json: bool = False, quick: bool = False) -> None:
    """The bare engine beside other engines, memory and torch: two shapes with random weights, and the embedded model.

    Peers are those that `python -m loadtest.peers.install` has put under $PENSTOCK_PEERS, else runs/peers.
    """
    import uvloop  # what the workers run on

    from penstock.bench.engine.measure import measure

    _run(measure, json, quick, uvloop.new_event_loop)


@app.command
def kv(*, json: bool = False, quick: bool = False) -> None:
    """The KV store beside memcpy, TCP, a grpc stream, the file system and an empty call."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # else it tells of every process that is started
    import uvloop  # what the services run on

    from penstock.bench.kv.measure import measure
    from penstock.runtime.telemetry import telemetry

    with telemetry("bench", "error"):
        _run(measure, json, quick, uvloop.new_event_loop)


@app.command
def evict(*, trace: list[Path] | None = None, json: bool = False, quick: bool = False) -> None:
    """Eviction policies on recorded requests, beside LRU and the offline optimum.

    Parameters
    ----------
    trace:
        A file of recorded requests; may be given more than once. Without it, those in ../shared/traces.
    """
    from penstock.bench.evict.measure import default_traces, measure

    _run(lambda quick: measure(trace or default_traces(), quick), json, quick)


@app.command
def house(*, root: Path = Path(), json: bool = False) -> None:
    """The source itself: sizes, signatures, docstrings, floors and arrows.

    Parameters
    ----------
    root:
        The checkout to read.
    """
    from penstock.bench.house.measure import measure

    show(measure(root), json)


@app.command(name="all")
def everything(*, json: bool = False, quick: bool = False) -> None:
    """Every bench, one after the other."""
    engine(json=json, quick=quick)
    overhead(json=json, quick=quick)
    kv(json=json, quick=quick)
