"""How a finished bench is printed: a table for people, one JSON object for programs, a section in Markdown."""

from __future__ import annotations

import sys
from typing import Protocol

from rich.console import Console, RenderableType

from penstock.bench.measured.document import section


class Showable(Protocol):
    """A report of a bench."""

    def json(self) -> str: ...

    def shown(self) -> RenderableType: ...


def show(report: Showable, *, as_json: bool, as_markdown: bool = False) -> None:
    """Prints the report to standard output."""
    if as_json:
        print(report.json())
    elif as_markdown:
        print(section(report.json()))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(report.shown())
