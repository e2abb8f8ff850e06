"""How a training run shows itself: a live bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

if TYPE_CHECKING:
    from .presets import TrainingPlan
    from .train import Progress as State
    from .train import Report

Reporter = Callable[[str, "TrainingPlan"], "Report"]  # a step's name and plan -> what is told after each update
EVERY = 25  # updates between two plain lines


@contextmanager
def display(console: Console) -> Iterator[Reporter]:
    """A reporter for the steps of a run; a bar lives as long as the context."""
    if not console.is_terminal:
        yield lambda name, plan: _lines(console, name, plan)
        return
    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=console) as bars:
        yield lambda name, plan: _bar(bars, name, plan)


def remaining(state: State, plan: TrainingPlan) -> str:
    """The time that a step still needs at its pace so far, as `1:23:45`."""
    share = state.fraction(plan)
    seconds = round(state.seconds * (1 - share) / share) if share else 0
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def figures(state: State, plan: TrainingPlan) -> str:
    """Tokens, tokens per second, loss and time left."""
    rate = state.tokens / max(state.seconds, 1e-9)
    return f"{state.tokens / 1e6:.2f}M tokens  {rate:.0f}/s  loss {state.loss:.3f}  left {remaining(state, plan)}"


def _lines(console: Console, name: str, plan: TrainingPlan) -> Report:
    def report(state: State, note: str) -> None:
        share = state.fraction(plan)
        if note or state.steps % EVERY == 0 or share >= 1.0:
            line = f"{time.strftime('%H:%M:%S')} {name} {share:6.1%}  step {state.steps}  {figures(state, plan)} {note}"
            console.print(line.rstrip(), soft_wrap=True, highlight=False, markup=False)

    return report


def _bar(bars: Progress, name: str, plan: TrainingPlan) -> Report:
    task: TaskID = bars.add_task(name, total=1.0, figures="")

    def report(state: State, note: str) -> None:
        bars.update(task, completed=state.fraction(plan), figures=figures(state, plan))
        if note:
            bars.console.print(f"{name}: {note}", highlight=False, markup=False)

    return report
