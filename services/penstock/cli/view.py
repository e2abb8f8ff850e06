"""The output of `penstock up`: a live line of states while the mesh starts, then only changes and warnings."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from penstock.cli.lines import plain, readable
from penstock.cli.supervisor import ChildChange, ChildState, describe_exit

_SHOWN_TAIL = 12
_MARKS = {
    ChildState.STARTING: "[dim]○[/]",
    ChildState.READY: "[green]●[/]",
    ChildState.HUNG: "[red]✗[/]",
    ChildState.STUCK: "[red]✗[/]",
    ChildState.DOWN: "[red]✗[/]",
    ChildState.STOPPING: "[dim]○[/]",
    ChildState.UNSTOPPED: "[red]✗[/]",
    ChildState.STOPPED: "[dim]·[/]",
}


class View:
    """Writes to standard error; standard output is left to the answer of the command."""

    def __init__(self, log_level: str, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._level = log_level
        self._states: dict[str, ChildState] = {}
        self._began = time.monotonic()
        self._status: Status | None = None
        self._stopping = False
        self._serving = False
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()

    def change(self, change: ChildChange) -> None:
        """A child's state has changed."""
        self._states[change.name] = change.state
        if change.state is ChildState.HUNG:
            self._console.print(f"[red]{change.name} does not answer and is killed[/]")
        elif change.state is ChildState.STUCK:
            self._console.print(f"[red]{change.name} says that it is stuck and is killed[/]")
        elif change.state is ChildState.STOPPING:
            self._console.print(f"[dim]waiting for {change.name} to stop[/]")
        elif change.state is ChildState.UNSTOPPED:
            self._console.print(f"[red]{change.name} has not stopped in time and is killed[/]")
        elif change.state is ChildState.DOWN:
            self._console.print(f"[red]{change.name} ended with {describe_exit(change.exit_code or 0)}[/]")
            self.tail(change.name, change.tail)
            after = f" in {change.back_in_s:g} s" if change.back_in_s else ""
            self._console.print(f"[yellow]{change.name} starts again{after}[/]")
        elif change.state is ChildState.READY and self._serving:
            self._console.print(f"[green]{change.name} is back[/]")
        elif change.state is ChildState.READY and not self._console.is_terminal:
            ready = sum(state is ChildState.READY for state in self._states.values())
            self._console.print(f"[dim]{change.name} is ready ({ready} of {len(self._states)})[/]")
        if self._status is not None:
            marks = "  ".join(f"{_MARKS[state]} {name}" for name, state in self._states.items())
            self._status.update(f"{'stopping' if self._stopping else 'starting'}  {marks}")

    def line(self, name: str, line: str) -> None:
        """A child has written a line."""
        hidden = self._stopping and name != "gateway" and self._level != "debug"  # its lines say what it waits for
        shown = None if hidden else readable(line, self._level)
        if shown is not None:
            self._console.print(f"[dim]{name}[/] {escape(shown)}", soft_wrap=True)

    def tail(self, name: str, lines: tuple[str, ...] | list[str]) -> None:
        """The last lines of a child that has ended."""
        for line in lines[-_SHOWN_TAIL:]:
            self._console.print(f"  [dim]{name}[/] {escape(plain(line))}", soft_wrap=True)

    def note(self, text: str) -> None:
        """Something that the user should know; empty: nothing."""
        if text:
            self._console.print(f"[dim]{escape(text)}[/]", soft_wrap=True)

    def ready(self, hint: str = "") -> None:
        """All is up; `hint` says what to do next."""
        self._serving = True
        self.quiet()
        took = time.monotonic() - self._began
        self._console.print(f"[dim]{len(self._states)} services in {took:.1f} s{hint and '; ' + hint}[/]")

    def interrupted(self) -> None:
        """A signal has asked for the end."""
        self._console.print("[dim]stopping, running requests may finish; Ctrl-C again ends everything at once[/]")
        self.stopping()

    def stopping(self) -> None:
        """The end has begun."""
        self._stopping = True
        self.quiet()

    def quiet(self) -> None:
        """Ends the live line."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def failed(self, what: str) -> None:
        """Why the command ends."""
        self.quiet()
        self._console.print(f"[red]penstock: {escape(what)}[/]", soft_wrap=True)
