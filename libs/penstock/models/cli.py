"""`penstock models`: train the embedded pair, and a head for it. Torch is imported only inside the commands.

`eval`, which starts a mesh, is a command of `penstock.cli.evaluating`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import cyclopts

app = cyclopts.App(name="models", help="Train the embedded models.")


def prepare(threads: int | None) -> None:
    """Let idle threads sleep: on a shared machine spinning ones starve the rest. Before torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    import torch

    if threads:
        torch.set_num_threads(threads)


@app.command
def train(
    preset: str = "mini",
    *,
    runs: Path = Path("runs"),
    only: Literal["seedling", "sapling", "pole", "target", "draft"] | None = None,
    minutes: float | None = None,
    threads: int | None = None,
    out: Path | None = None,
    save_every: float = 120.0,
    sitting: float | None = None,
    start: Path | None = None,
    measure: bool = False,
) -> None:
    """Train the pair of a preset, resuming where an earlier run stopped; shows a bar on a terminal, else lines.

    A small network is trained first (the seedling), then with more layers (the sapling), then for long on dense
    sessions (the pole), then at twice the width: the target. The draft is the seedling again, distilled from the
    target.

    Args:
        preset: `mini` for the embedded pair, `tiny` for a rehearsal of seconds.
        runs: where checkpoints are kept; a run lives in its preset's folder.
        only: do one of the five steps; what it stands on must be done.
        minutes: another time budget for each step.
        threads: CPU threads.
        out: where the finished model directories go; the run's folder unless told.
        save_every: seconds between checkpoints.
        sitting: minutes after which to save and stop; the next run goes on from there.
        start: a model directory that one step, `only`, goes on from: for a tenth of its tokens, at a lower rate. A
            draft's target is the one in `runs`.
        measure: train nothing; print how fast each step is, beside a plain loop over padded rows, and its parts' times.
    """
    prepare(threads)
    if measure:
        return _measure(preset, only)
    if start is not None and only is None:
        sys.exit("start: one step goes on from it; name it with --only")
    from rich.console import Console

    from .display import display
    from .pair import STEPS, train_pair
    from .presets import PRESETS

    steps = STEPS if only is None else (only,)
    with display(Console(stderr=True)) as reporter:
        try:
            train_pair(
                PRESETS[preset],
                runs / preset,
                out or runs / preset,
                steps,
                minutes=minutes,
                save_every=save_every,
                sitting=sitting,
                start=start,
                reporter=reporter,
            )
        except FileNotFoundError as reason:
            sys.exit(str(reason))


@app.command
def trial(
    *names: str,
    preset: str = "mini",
    runs: Path = Path("runs/trials"),
    minutes: float = 10.0,
    tokens: int | None = None,
    count: int = 40,
    threads: int | None = None,
    processes: int | None = None,
) -> None:
    """Train for some minutes with one thing changed, and print a row for each change.

    Args:
        names: what to change; everything in turn unless told.
        preset: whose plan is changed.
        runs: where checkpoints are kept; a trial that has finished there is only measured.
        minutes: of computing for each: what other work on the machine takes is not counted.
        tokens: for each, in place of minutes.
        count: held-out sessions of each kind.
        threads: CPU threads.
        processes: draw the documents; one for each core but one, where a GPU computes.
    """
    prepare(threads)
    from rich.console import Console

    from .display import display
    from .presets import PRESETS
    from .trials import COLUMNS, TRIALS, run_trial

    if unknown := set(names) - set(TRIALS):
        sys.exit(f"names: there is no trial {', '.join(sorted(unknown))}; there are {', '.join(TRIALS)}")
    print(f"| trial | what is different | tokens | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 3)}")
    with display(Console(stderr=True)) as reporter:
        for name in names or TRIALS:
            row = run_trial(
                PRESETS[preset],
                name,
                minutes=None if tokens else minutes,
                tokens=tokens or 10**12,
                folder=runs / preset,
                count=count,
                reporter=reporter,
                processes=processes,
            )
            print(row, flush=True)


def _measure(preset: str, only: str | None) -> None:
    """Prints the pace of a preset's steps; a draft's is that of a seedling and of its teacher."""
    from .pace import STEPS, pace
    from .presets import PRESETS

    for step in STEPS if only is None else (only,):
        print(pace(PRESETS[preset], step), flush=True)


@app.command
def head(
    out: Path,
    *,
    preset: str = "mini",
    target: Path | None = None,
    start: Path | None = None,
    minutes: float | None = None,
    threads: int | None = None,
) -> None:
    """Train a draft head for a model that stays as it is, and print how many of its guesses are right.

    A head learns the target's own distributions over generated sessions, for a few guesses in a row. It is written in
    the layout of published EAGLE-3 checkpoints, for `penstock up --draft-head`.

    Args:
        out: the directory of the head.
        preset: `mini` for the embedded model, `tiny` for a rehearsal of seconds.
        target: the model; the embedded one unless told.
        start: a head to go on from.
        minutes: another time budget.
        threads: CPU threads.
    """
    prepare(threads)
    from dataclasses import replace

    from rich.console import Console

    from . import embedded
    from .display import display
    from .export import load
    from .presets import HEADS
    from .teach import HeadTrainer, export_head, load_head, measure_head

    plan = HEADS[preset]
    if minutes is not None:
        plan = replace(plan, run=replace(plan.run, minutes=minutes))
    net, tokenizer = load(target or embedded("penstock-mini"))
    trainer = HeadTrainer(plan, net, tokenizer, start=None if start is None else load_head(start))
    with display(Console(stderr=True)) as reporter:
        trainer.run(reporter("head", plan.run))
    export_head(trainer.head, out)
    for reach, shares in measure_head(trainer.head, net, tokenizer, plan).items():
        print(f"sees {reach:4} tokens back: right behind right ones " + " ".join(f"{share:.2f}" for share in shares))


if __name__ == "__main__":
    app()
