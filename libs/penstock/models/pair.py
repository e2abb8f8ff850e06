"""The whole run, step by step: seedling, sapling, pole, target, and the draft distilled from it; each is resumable."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from .distil import OwnWords, imitate
from .export import export, load
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
    start: Path | None = None,
    reporter: Callable[[str, TrainingPlan], Report],
) -> None:
    """Do `steps` in their order, checkpoints in `folder`, and write the finished models under `out`.

    A step that was finished before costs only its loading, so a killed run is resumed by running it again; and one that
    ends after a `sitting` of so many minutes, wherever it is then. With `start`, a model directory, steps go on from
    that model by the sequel of their plan.
    """
    until = math.inf if sitting is None else time.monotonic() + 60 * sitting
    run = _PairRun(preset, learn_tokenizer(preset, folder / "tokenizer.json"), folder)
    for step in steps:
        plan: TrainingPlan = getattr(preset, step)
        if minutes is not None:
            plan = replace(plan, minutes=minutes)
        if start is not None:
            plan = plan.sequel()
        trainer = run.trainer(step, plan, run.origin(step, plan) if start is None else load(start)[0])
        net = trainer.run(reporter(step, plan), save_every, until=until)
        if not trainer.finished:
            return
        if step in NAMES:
            export(net.cpu(), run.tokenizer, out / NAMES[step])


@dataclass(frozen=True)
class _PairRun:
    """Training in a folder, where each step has its checkpoint."""

    preset: Preset
    tokenizer: Tokenizer
    folder: Path

    def trainer(self, step: str, plan: TrainingPlan, start: Net | None) -> Trainer:
        """What does a step of this plan, from `start`."""
        home = self.folder / step
        if step != "draft":
            return Trainer(plan, self.tokenizer, home, start=start)
        target = self._made("target")
        own = OwnWords(target, self.tokenizer, Library(evaluation=False), seed=plan.seed, rows=self.preset.own_texts)
        return Trainer(plan, self.tokenizer, home, loss=imitate(target), start=start, library=own)

    def origin(self, step: str, plan: TrainingPlan) -> Net | None:
        """The network that a step begins with; None for the first, which begins with induction heads."""
        match step:
            case "seedling":
                return None
            case "sapling":
                return deepen(self._made("seedling").cpu(), self.preset.places, plan.seed)
            case "pole":
                return self._made("sapling").cpu()
            case "target":
                return widen(self._made("pole").cpu(), plan.seed)
        return self._made("seedling").cpu()

    def _made(self, step: str) -> Net:
        """What a step has made. FileNotFoundError: it has not been done."""
        if not (self.folder / step / "checkpoint.safetensors").exists():
            raise FileNotFoundError(f"{self.folder / step}: there is no checkpoint; do the step {step} first")
        return Trainer(getattr(self.preset, step), self.tokenizer, self.folder / step).net
