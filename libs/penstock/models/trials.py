"""Short runs that decide how the long ones go: each trains on for some minutes and differs from the plan in one thing.

All begin as the embedded draft with the sapling's layers added, see the pole's documents otherwise, and are measured on
the same held-out sessions, so that their rows can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from . import embedded
from .data import Emphasis, Stage
from .display import Reporter
from .export import load
from .grow import deepen, widen, with_heads
from .measure import exact
from .net import Net
from .presets import Preset, TrainingPlan
from .render import DECISION
from .train import Trainer
from .turns import documents

KINDS = ("L1", "L2", "L3", "everyday", "long", "json", "facts")
COLUMNS = ("name", "call", "value", "json", "name L1", "name L2", "name L3", "name everyday", "name long")
"""What is measured: ranges of these labels, of one kind of document or of all."""


@dataclass(frozen=True)
class Trial:
    """What differs: the plan, and the network from which the run begins."""

    what: str
    plan: Callable[[TrainingPlan], TrainingPlan] = lambda plan: plan
    start: Callable[[Net], Net] = lambda net: net


@dataclass(frozen=True)
class TrialResult:
    """What a trial came to. `shares` are how many ranges greedy decoding writes exactly, and of how many, by column."""

    name: str
    what: str
    tokens: int
    seconds: float
    shares: Mapping[str, tuple[int, int]]

    def __str__(self) -> str:
        """A row of a table in Markdown."""
        shares = " | ".join(f"{right / max(1, total):.3f}" for right, total in self.shares.values())
        return f"| {self.name} | {self.what} | {self.tokens / 1e6:.1f}M | {shares} |"


def _added(kinds: Mapping[str, float]) -> Callable[[TrainingPlan], TrainingPlan]:
    """The plan with so much more of some kinds."""

    def more(stage: Stage) -> Stage:
        return replace(stage, mixture={**stage.mixture, **{k: stage.mixture.get(k, 0) + n for k, n in kinds.items()}})

    return lambda plan: replace(plan, stages=tuple(more(stage) for stage in plan.stages))


def _staged(*stages: tuple[float, Mapping[str, float] | None, int]) -> Callable[[TrainingPlan], TrainingPlan]:
    """The plan with these stages before its last; None is the mixture of its first."""

    def change(plan: TrainingPlan) -> TrainingPlan:
        first, *_, last = plan.stages
        before = (Stage(until, mixture or first.mixture, length) for until, mixture, length in stages)
        return replace(plan, stages=(*before, last))

    return change


_FEW = {"dense1": 20, "L1": 20, "dense2": 15, "select": 10, "lookup": 5, "jsons": 8, "errands": 8, "text": 3}
_MANY = {
    "names": 14,
    "dense3": 30,
    "errands": 14,
    "L3": 8,
    "long": 8,
    "everyday": 4,
    "jsons": 10,
    "facts": 5,
    "text": 3,
}

TRIALS: Mapping[str, Trial] = MappingProxyType(
    {
        "plan": Trial("as planned"),
        "quiet": Trial("plain English counts a tenth", lambda p: replace(p, emphasis=Emphasis(text=0.1))),
        "foretold": Trial(
            "words of names and keys that a description has count too",
            lambda p: replace(p, emphasis=Emphasis(foretold=0.5)),
        ),
        "alike": Trial(
            "a third of the sessions has tools that share words", _added({"alike2": 12, "alike3": 20, "likenames": 8})
        ),
        "told": Trial(
            "a third of the sessions has tools whose descriptions paraphrase", _added({"told2": 12, "told3": 24})
        ),
        "differing": Trial(
            "where a name differs from the others first counts three times",
            lambda p: replace(p, emphasis=Emphasis(differing=DECISION)),
        ),
        "ladder": Trial("few tools at first, then more", _staged((0.25, _FEW, 1400), (0.85, _MANY, 2600))),
        "long": Trial("prompts of up to 4,096 tokens from half of the run on", _staged((0.5, None, 2000))),
        "drills": Trial("three times the drills", _added({"select": 8, "lookup": 6, "repeat": 4})),
        "faster": Trial("1.6 times the rate", lambda p: replace(p, rate=4e-3)),
        "smaller": Trial("half the tokens in a step", lambda p: replace(p, batch=p.batch // 2)),
        "heads": Trial("four heads in place of two", start=lambda net: with_heads(net, 4, 1)),
        "deeper": Trial(
            "a layer more", start=lambda net: deepen(net, (*range(net.shape.layers - 1), net.shape.layers), 1)
        ),
        "wide": Trial(
            "twice the width at once, at 0.6 of the rate",
            lambda p: replace(p, rate=1.5e-3),
            lambda net: widen(net, 1),
        ),
    }
)


def run_trial(
    preset: Preset,
    name: str,
    *,
    minutes: float | None,
    tokens: int = 10**12,
    folder: Path,
    count: int,
    reporter: Reporter,
    processes: int | None = None,
) -> TrialResult:
    """One trial of so many minutes or tokens, its checkpoint in `folder`; one that has finished there is measured
    only. `processes` draw its documents."""
    trial = TRIALS[name]
    net, tokenizer = load(embedded("penstock-mini-draft"))
    start = trial.start(deepen(net, preset.places, preset.sapling.seed))
    plan = trial.plan(replace(preset.pole, shape=start.shape, minutes=minutes, tokens=tokens))
    trainer = Trainer(plan, tokenizer, folder / name, start=start, processes=processes)
    trained = trainer.run(reporter(name, plan), measure_every=math.inf)
    scores = exact(trained, tokenizer, documents(KINDS, count, 11))
    shares = {column: _share(scores, *column.split()) for column in COLUMNS}
    return TrialResult(name, trial.what, trainer.progress.tokens, trainer.progress.seconds, shares)


def _share(scores: Mapping[str, tuple[int, int]], label: str, kind: str = "") -> tuple[int, int]:
    """How many of the ranges of a label are right, of one kind or of all, and how many there are."""
    found = [count for key, count in scores.items() if key.startswith(kind) and key.endswith(f"/{label}")]
    return sum(right for right, _ in found), sum(total for _, total in found)
