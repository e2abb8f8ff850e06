"""The command line of the benches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from cyclopts import App

from penstock.cli.bench.harness import Report, show

app = App(name="bench", help="Measure, beside a peer or a limit in the same run.")


def _run(bench: Callable[[bool], Coroutine[Any, Any, Report]], json: bool, quick: bool) -> None:
    show(asyncio.run(bench(quick)), json)


@app.command
def overhead(*, json: bool = False, quick: bool = False) -> None:
    """The whole mesh beside the same engine driven in one process: TTFT and tokens/s, 1 and 8 streams."""
    from penstock.cli.bench.overhead import measure

    _run(measure, json, quick)


@app.command(name="all")
def everything(*, json: bool = False, quick: bool = False) -> None:
    """Every bench, one after the other."""
    overhead(json=json, quick=quick)
