"""The whole run, step by step: seedling, sapling, pole, target, and the draft distilled from it; each is resumable."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from .distil import OwnWords, imitate
from .export import export
from .grow import deepen, widen
from .net import Net
from .presets import Preset, TrainingPlan
from .text import Library
from .train import Report, Trainer, learn_tokenizer

STEPS = ("seedling", "sapling", "pole", "target", "draft")
NAMES = {"target": "penstock-mini", "draft": "penstock-mini-draft"}


def train_pair(
    preset: Preset,
    folder: Path,
    out: Path,
    steps: Sequence[str],
    *,
    minutes: float | None,
    save_every: float,
    sitting: float | None = None,
    reporter: Callable[[str, TrainingPlan], Report],
) -> None:
    """Do `steps` in their order, checkpoints in `folder`, and write the finished models under `out`.

    A step that was finished before costs only its loading, so a killed run is resumed by running it again; and one that
    ends after a `sitting` of so many minutes, wherever it is then.
    """
    until = math.inf if sitting is None else time.monotonic() + 60 * sitting
    tokenizer = learn_tokenizer(preset, folder / "tokenizer.json")
    for step in steps:
        plan: TrainingPlan = getattr(preset, step)
        if minutes is not None:
            plan = replace(plan, minutes=minutes)
        trainer = _trainer(preset, step, plan, tokenizer, folder)
        net = trainer.run(reporter(step, plan), save_every, until=until)
        if not trainer.finished:
            return
        if step in NAMES:
            export(net.cpu(), tokenizer, out / NAMES[step])


def _trainer(preset: Preset, step: str, plan: TrainingPlan, tokenizer: Tokenizer, folder: Path) -> Trainer:
    home = folder / step
    if step == "seedling":
        return Trainer(plan, tokenizer, home)
    if step == "target":
        pole = Trainer(preset.pole, tokenizer, folder / "pole").net.cpu()
        return Trainer(plan, tokenizer, home, start=widen(pole, plan.seed))
    if step == "pole":
        return Trainer(plan, tokenizer, home, start=Trainer(preset.sapling, tokenizer, folder / "sapling").net.cpu())
    seedling = Trainer(preset.seedling, tokenizer, folder / "seedling").net.cpu()
    if step == "sapling":
        return Trainer(plan, tokenizer, home, start=deepen(seedling, preset.places, plan.seed))
    target: Net = Trainer(preset.target, tokenizer, folder / "target").net
    own = OwnWords(target, tokenizer, Library(evaluation=False), seed=plan.seed, rows=preset.own_texts)
    return Trainer(plan, tokenizer, home, loss=imitate(target), start=seedling, library=own)
