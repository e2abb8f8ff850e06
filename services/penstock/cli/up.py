"""`penstock up`: starts the mesh and stays until it is stopped."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from penstock.cli.hub import fetch
from penstock.cli.mesh import MeshOptions
from penstock.cli.running import run_until_signalled, running_mesh
from penstock.cli.supervisor import ChildFailed
from penstock.cli.view import View
from penstock.runtime.config import ConfigError


def up(options: MeshOptions) -> int:
    """Starts the mesh and stays until it is told to stop. Returns the exit code."""
    return reporting(options, partial(_stay, options))


def reporting(options: MeshOptions, main: Callable[[View], Awaitable[int]]) -> int:
    """Runs `main(view)`; reports the reason when the mesh cannot start."""
    try:
        for name, chosen in (*(("model", model) for model in options.models), ("draft", options.draft)):
            if chosen not in ("", "none"):
                fetch(name, chosen)  # its progress bars come before the view's own line
    except ConfigError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    view = View(options.log_level)
    try:
        return run_until_signalled(partial(main, view))
    except ConfigError as error:
        view.failed(str(error))
        return 2
    except ChildFailed as error:
        view.failed(str(error))
        view.tail(error.name, error.tail)
        return 1
    finally:
        view.quiet()


async def _stay(options: MeshOptions, view: View) -> int:
    async with running_mesh(options, view) as mesh:
        view.quiet()
        print(f"ready {mesh.url}", flush=True)
        stop = "; Ctrl-C stops" if sys.stderr.isatty() else ""
        others = f" and {', '.join(mesh.others)}" if mesh.others else ""
        models = f"model{'s' * (len(options.names) > 1)} {', '.join(options.names)}"
        view.ready(f"gRPC {mesh.grpc}{others}; router {mesh.router}; {models}{stop}")
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()  # until a signal cancels this task: its regular end
    return 0
