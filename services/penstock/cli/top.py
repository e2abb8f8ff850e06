"""`penstock ctl top`: what the mesh does, again and again."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import nullcontext

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from penstock.cli.asking import NOWHERE, AsJson, Mesh, MeshAccess, done, members, of_first
from penstock.cli.frames import drawn
from penstock.errors import PenstockError
from penstock.rpc.shown.figures import Frame, Window, frame_of


def top(
    *,
    mesh: Mesh = NOWHERE,
    once: bool = False,
    every_s: float = 1.0,
    as_json: AsJson = False,
) -> int:
    """Shows what the mesh does, until Ctrl-C: workers and their queues, batches, memory, hits and drafts; the stores'
    tiers; draft services; sessions.

    Parameters
    ----------
    once:
        Shows one frame and ends.
    every_s:
        Seconds between two frames.
    as_json:
        Writes one JSON object and ends; docs/operating.md describes its fields.
    """
    if not every_s >= 0.1:  # also for a NaN
        print(f"penstock ctl: --every-s = {every_s}: must be 0.1 or more", file=sys.stderr)
        return 2
    if once or as_json:
        return done(_frame(mesh), _print, lambda frame: frame.plain(), as_json=as_json)
    try:
        return asyncio.run(_watch(mesh, every_s))
    except KeyboardInterrupt:
        return 0


async def _frame(mesh: MeshAccess) -> Frame:
    return frame_of(await of_first(mesh, members))


def _print(frame: Frame) -> None:
    Console().print(drawn(frame, frame.since_start()))


async def _watch(mesh: MeshAccess, every_s: float) -> int:
    """Shows frames until it is cancelled; a router that does not answer may come back, unless it never has."""
    console, window, seen = Console(), Window(), False
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            try:
                frame = await _frame(mesh)
            except PenstockError as error:
                if not seen:
                    print(f"penstock ctl: {error.message}", file=sys.stderr)
                    return 1
                shown: RenderableType = Text(f"the router does not answer ({error.message}); trying again")
            else:
                seen, shown = True, drawn(frame, window.add(frame, time.monotonic()))
            if live is None:
                console.print(shown)
            else:
                live.update(shown, refresh=True)
            await asyncio.sleep(every_s)
