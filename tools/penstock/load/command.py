"""The command line of loads."""

from __future__ import annotations

import asyncio
import json as jsonlib
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import uvloop
from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.load.comparing import compared
from penstock.load.errors import LoadError
from penstock.load.options import LoadOptions
from penstock.load.page import page
from penstock.load.planning import LoadPlan
from penstock.load.processes import ClientProcesses
from penstock.load.records import LoadRecord
from penstock.load.report import LoadRun, record_lines, report
from penstock.load.running import run
from penstock.load.table import shown

app = App(
    name="load",
    help="Plays a recorded or made-up workload before any server with OpenAI's API, and reports what came of it.",
)


@app.default
def load(
    trace: Path | None = None,
    *,
    options: Annotated[LoadOptions | None, Parameter(name="*")] = None,
    out: Path | None = None,
    html: Path | None = None,
    records: Path | None = None,
    json: bool = False,
) -> int:
    """Sends each request when it is due, however slow the answers are, and counts its time from then on.

    Ends with status 0, with 1 if nothing was answered, and with 2 if it can't be done.

    Parameters
    ----------
    trace:
        JSON lines with hash_ids (Mooncake), with input and output (LMCache's agents) or with requests (coding agents),
        a CSV file of lengths (Azure), each perhaps gzipped; or a TOML file with a [[mix]].
    out:
        Write the report to this JSON file.
    html:
        Write it to this page, with plots.
    records:
        Write every request to this file, one a line.
    json:
        Print the report as one JSON object and nothing else.
    """
    files = [path for path in (out, html, records) if path is not None]
    try:
        _check_places(files)
        done = uvloop.run(_played(options or LoadOptions(), trace, quiet=json))
    except LoadError as error:
        print(f"penstock load: {error}", file=sys.stderr)
        return 2
    found = report(done)
    encoded = msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"
    if out:
        out.write_bytes(encoded)
    if html:
        html.write_text(page(found, done.records), encoding="utf-8")
    if records:
        records.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in record_lines(done)))
    if json:
        print(encoded.decode(), end="")
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(shown(found))
    return 0 if found["request_count"]["avg"] else 1


@app.command
def compare(a: Path, b: Path, *, json: bool = False) -> int:
    """Two reports side by side: what of each metric changed, which way is better, and whether chance does as much.

    Parameters
    ----------
    a:
        What `penstock load --out` wrote, of the run to compare with.
    b:
        That of the other run.
    json:
        Print one JSON object and nothing else.
    """
    try:
        found = compared(_read(a), _read(b))
    except LoadError as error:
        print(f"penstock load compare: {error}", file=sys.stderr)
        return 2
    if json:
        print(msgspec.json.encode(found.json()).decode())
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(found.shown(str(a), str(b)))
    return 0


def _check_places(files: Iterable[Path]) -> None:
    """Before a run, which may be a long one. Raises LoadError for a file that can't be written."""
    for path in files:
        try:
            path.open("ab").close()
        except OSError as error:
            raise LoadError(f"{path} can't be written: {error.strerror}") from None


async def _played(options: LoadOptions, trace: Path | None, *, quiet: bool) -> LoadRun:
    """A run that SIGINT and SIGTERM end early, with its report."""
    processes = ClientProcesses()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, processes.stop)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as bar:
        task = bar.add_task("asking the server", total=None)
        failed = 0

        def begun(plan: LoadPlan, rounds: int) -> None:
            total = rounds * sum(len(session.turns) for session in plan.sessions)
            bar.update(task, description=plan.name, total=total)

        def told(record: LoadRecord) -> None:
            nonlocal failed
            failed += not record.good
            bar.update(task, advance=1, description=f"{failed} failed" if failed else None)

        return await run(options, trace, processes, told, begun)


def _read(path: Path) -> dict[str, object]:
    try:
        found = jsonlib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise LoadError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict) or "request_count" not in found:
        raise LoadError(f"{path} is no report of a load: it has no request_count")
    return found
