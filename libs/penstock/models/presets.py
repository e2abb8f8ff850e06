"""What a training run consists of: sizes, data mixture and budget, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from .data import Emphasis, Stage
from .grow import widened
from .net import NetShape


@dataclass(frozen=True)
class TrainingPlan:
    """One model's training. It ends after `tokens` tokens or, if there is such a limit, after `minutes` of computing,
    whichever is first; the learning rate and the mixture follow the fraction of that budget that is used. Without
    minutes a run that was stopped and resumed computes what an uninterrupted one does."""

    shape: NetShape
    rate: float
    tokens: int
    stages: tuple[Stage, ...]
    minutes: float | None = None
    batch: int = 8192  # tokens of a step, give or take a document
    warmup: int = 60
    hold: float = 0.3  # fraction of the run at the full rate, before the linear decay
    floor: float = 0.02  # fraction of the rate at which the decay ends
    seed: int = 1
    emphasis: Emphasis = field(default_factory=Emphasis)

    def sequel(self) -> TrainingPlan:
        """How to go on from what this plan has made: for a tenth of its tokens, at 0.4 of its rate, in half steps."""
        return replace(self, tokens=self.tokens // 10, rate=0.4 * self.rate, batch=self.batch // 2)


@dataclass(frozen=True)
class Preset:
    """A pair. The seedling, of the draft's shape, is trained first; the sapling is the seedling with more layers,
    its layer i becoming layer `places[i]`; the pole is the sapling, trained for longer on dense sessions; the target
    is the pole at twice the width; each is trained on from where the last one was. The draft starts as the seedling
    and is distilled from the target."""

    seedling: TrainingPlan
    sapling: TrainingPlan
    pole: TrainingPlan
    target: TrainingPlan
    draft: TrainingPlan
    places: tuple[int, ...]
    vocabulary: int = 4096
    tokenizer_documents: int = 6000
    own_texts: int = 192  # texts that the target writes for its draft to learn from


@dataclass(frozen=True)
class HeadPlan:
    """The training of a draft head. Of the shape in `run`, width and vocabulary are the target's."""

    run: TrainingPlan
    layers: tuple[int, ...]  # after how many of the target's layers it takes hidden states
    draft_vocabulary: int
    steps: int = 5  # guesses in a row that it learns
    counted: int = 60  # batches whose tokens are counted for its vocabulary


_START = {"repeat": 5, "lookup": 10, "select": 15, "L1": 50, "chat": 5, "everyday": 10, "text": 5}
_MIDDLE = {"select": 10, "lookup": 6, "L1": 24, "L2": 28, "everyday": 15, "json": 6, "facts": 4, "chat": 3, "text": 4}
_MAIN = {
    "repeat": 6,
    "select": 6,
    "lookup": 3,
    "L1": 12,
    "L2": 18,
    "L3": 28,
    "everyday": 18,
    "json": 7,
    "facts": 3,
    "chat": 2,
    "text": 4,
}
_END = {
    "repeat": 6,
    "L1": 8,
    "L2": 12,
    "L3": 26,
    "everyday": 18,
    "long": 10,
    "huge": 7,
    "json": 8,
    "facts": 3,
    "chat": 3,
    "select": 2,
    "text": 5,
}

_STAGES = (Stage(0.08, _START, 1024), Stage(0.22, _MIDDLE, 1400), Stage(0.8, _MAIN, 2000), Stage(1.0, _END, 4096))
_AFTER = {
    "repeat": 4,
    "L1": 8,
    "L2": 14,
    "L3": 30,
    "everyday": 24,
    "json": 12,
    "facts": 3,
    "chat": 3,
    "select": 2,
    "text": 4,
}
_MIXED = {
    "repeat": 4,
    "L1": 7,
    "L2": 10,
    "L3": 25,
    "everyday": 22,
    "long": 10,
    "huge": 4,
    "json": 11,
    "facts": 3,
    "chat": 4,
    "text": 4,
}
_DENSE = {
    "names": 16,
    "dense1": 5,
    "dense2": 12,
    "dense3": 20,
    "errands": 10,
    "L2": 3,
    "L3": 6,
    "everyday": 4,
    "jsons": 10,
    "json": 2,
    "select": 4,
    "lookup": 3,
    "repeat": 2,
    "facts": 5,
    "chat": 2,
    "text": 3,
}
_LAST = {
    "names": 8,
    "repeat": 2,
    "dense1": 3,
    "dense2": 8,
    "dense3": 16,
    "errands": 9,
    "L1": 3,
    "L2": 4,
    "L3": 8,
    "everyday": 7,
    "long": 10,
    "huge": 2,
    "json": 3,
    "jsons": 8,
    "facts": 5,
    "chat": 3,
    "text": 4,
}
_WHOLE = {
    "names": 8,
    "likenames": 3,
    "select": 2,
    "repeat": 2,
    "dense1": 3,
    "dense2": 8,
    "dense3": 16,
    "alike3": 5,
    "errands": 13,
    "L1": 3,
    "L2": 4,
    "L3": 8,
    "lacking": 8,
    "everyday": 8,
    "long": 8,
    "huge": 2,
    "json": 4,
    "jsons": 9,
    "facts": 5,
    "chat": 3,
    "text": 4,
}
_LONGER = {**_WHOLE, "dense3": 14, "L2": 6, "L3": 10, "everyday": 10, "long": 14, "huge": 5, "vast": 3}
_GROWN = (Stage(0.55, _AFTER, 2000), Stage(1.0, _MIXED, 4096))
_POLE = (Stage(0.85, _DENSE, 2000), Stage(1.0, _LAST, 4096))
_TARGET = (Stage(0.5, _WHOLE, 4096), Stage(1.0, _LONGER, 8192))
_FINAL = (Stage(1.0, _LAST, 4096),)
_SMALL = NetShape(4, 128, 352, 2, 2)
_DEEP = replace(_SMALL, layers=6)
_TINY = (Stage(1.0, {"repeat": 1, "L1": 2, "chat": 1, "text": 1}, 768),)
_DOT = NetShape(2, 32, 64, 2, 2, vocabulary=384, head=16)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "mini": Preset(
            seedling=TrainingPlan(_SMALL, 4e-3, 10_000_000, _STAGES, seed=2, batch=4096),
            sapling=TrainingPlan(_DEEP, 3e-3, 6_000_000, _GROWN, hold=0.25, seed=3, batch=4096),
            pole=TrainingPlan(_DEEP, 2.5e-3, 60_000_000, _POLE, hold=0.05, floor=0.04, seed=6),
            target=TrainingPlan(widened(_DEEP), 1.5e-3, 150_000_000, _TARGET, batch=16_384, seed=7),
            draft=TrainingPlan(_SMALL, 1.5e-3, 30_000_000, _FINAL, hold=0.1, seed=4),
            places=(0, 1, 3, 5),
        ),
        "tiny": Preset(
            seedling=TrainingPlan(_DOT, 4e-3, 20_000, _TINY, batch=768, warmup=5),
            sapling=TrainingPlan(replace(_DOT, layers=3), 2e-3, 20_000, _TINY, batch=768, warmup=5),
            pole=TrainingPlan(replace(_DOT, layers=3), 2e-3, 20_000, _TINY, batch=768, warmup=5),
            target=TrainingPlan(widened(replace(_DOT, layers=3)), 2e-3, 20_000, _TINY, batch=768, warmup=5),
            draft=TrainingPlan(_DOT, 2e-3, 20_000, _TINY, batch=768, warmup=5),
            places=(0, 2),
            vocabulary=384,
            tokenizer_documents=20,
            own_texts=32,
        ),
    }
)

_SAID = {**_LAST, "long": 0, "huge": 0, "names": 2, "text": 12}
HEADS: Mapping[str, HeadPlan] = MappingProxyType(
    {
        "mini": HeadPlan(
            TrainingPlan(
                NetShape(1, 256, 256, 2, 2), 3e-3, 10_000_000, (Stage(1.0, _SAID, 512),), 24, 1024, hold=0.3, seed=8
            ),
            (1, 3, 5),
            1280,
        ),
        "tiny": HeadPlan(
            TrainingPlan(NetShape(1, 64, 64, 2, 1, head=16), 4e-3, 20_000, _TINY, batch=768, warmup=5),
            (1, 2),
            128,
            counted=4,
        ),
    }
)
