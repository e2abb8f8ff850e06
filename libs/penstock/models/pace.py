"""How fast training is: tokens per second and the time of each part, beside a plain loop in the same run.

The plain loop is the reference of the fast path: rows of nearly equal lengths, padded, through `Net` under autocast,
and an optimizer in float32. Both get the documents of a run, turn by turn, at several points of its plan.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from . import embedded
from .data import BatchStream, DocumentStream, TrainingBatch
from .induction import initialise
from .net import Net
from .optim import Optimizer
from .presets import Preset, TrainingPlan
from .train import Progress, Stopwatch, Trainer, device, learn_tokenizer, rate_at

STEPS = ("seedling", "sapling", "pole", "target")
_POINTS = (0.3, 0.6, 0.95)
_NAIVE_BATCH = 4096


@dataclass(frozen=True)
class Pace:
    """Seconds of each part, and the tokens in that time."""

    tokens: int
    seconds: dict[str, float]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / sum(self.seconds.values())

    def __str__(self) -> str:
        parts = "  ".join(f"{part} {1e6 * seconds / self.tokens:.1f}" for part, seconds in self.seconds.items())
        return f"{self.rate:,.0f} tokens/s (microseconds a token: {parts})"


class PlainTrainer:
    """The reference: one padded batch a step, everything as torch does it by itself."""

    def __init__(self, plan: TrainingPlan, tokenizer: Tokenizer, dtype: torch.dtype) -> None:
        self.plan = plan
        self.dtype = dtype
        self.device = device()
        self.net = Net(plan.shape)
        initialise(self.net, plan.seed)
        self.net.to(self.device)
        self.optimizer = Optimizer(self.net.named_parameters())
        self.stream = BatchStream(DocumentStream(tokenizer, plan.stages, plan.seed), _NAIVE_BATCH)
        self.watch = Stopwatch()
        self.progress = Progress()

    def step(self) -> float:
        """One update; returns the loss."""
        with self.watch.part("data"):
            batch = self.stream.next(self.progress.fraction(self.plan)).to(self.device)
        with self.watch.part("forward"), torch.autocast(self.device.type, self.dtype, self.dtype != torch.float32):
            loss = plain_loss(self.net, batch)
        with self.watch.part("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        with self.watch.part("optimizer"):
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step(rate_at(self.plan, self.progress))
        self.progress.tokens += batch.tokens
        return loss.item()


def plain_loss(net: Net, batch: TrainingBatch) -> Tensor:
    """The weighted mean of the losses at the positions that count."""
    losses = F.cross_entropy(net(batch.ids, batch.keep), batch.targets, reduction="none")
    return (losses * batch.weights).sum() / batch.weights.sum()


def pace(preset: Preset, step: str) -> str:
    """A report of one step of a preset: the plain loop, the fast path, and how many times as fast it is."""
    plan: TrainingPlan = getattr(preset, step)
    with tempfile.TemporaryDirectory() as folder:
        path = embedded("penstock-mini") / "tokenizer.json"
        if Tokenizer.from_file(str(path)).get_vocab_size() != preset.vocabulary:
            path = Path(folder) / "tokenizer.json"
        tokenizer = learn_tokenizer(preset, path)
        fast = Trainer(plan, tokenizer, Path(folder))
        plain = PlainTrainer(plan, tokenizer, fast.model.kernels.dtype)
        fast.step(), plain.step()
        rounds = [_round(plain, fast, at) for at in _POINTS]
    before, after = (_sum(each) for each in zip(*rounds, strict=True))
    ratios = sorted(a.rate / b.rate for b, a in rounds)
    kernels = type(fast.model.kernels).__name__
    return (
        f"{step}\n  plain  {before}\n  packed {after}, {kernels}\n"
        f"  {after.rate / before.rate:.2f} times as fast ({ratios[0]:.2f} to {ratios[-1]:.2f} in {len(rounds)} rounds)"
    )


def _round(plain: PlainTrainer, fast: Trainer, at: float) -> tuple[Pace, Pace]:
    """What both make of the documents at one point of the plan: of all that the plain loop sorts at a time."""
    plain.stream.ready.clear()
    before = _timed(plain, at, lambda tokens: bool(tokens) and not plain.stream.ready)
    return before, _timed(fast, at, lambda tokens: tokens >= before.tokens)


def _timed(trainer: PlainTrainer | Trainer, at: float, enough: Callable[[int], bool]) -> Pace:
    progress, trainer.watch = trainer.progress, Stopwatch()
    start = progress.tokens = round(at * trainer.plan.tokens)
    while not enough(progress.tokens - start):
        trainer.step()
    return Pace(progress.tokens - start, dict(trainer.watch.seconds))


def _sum(paces: Sequence[Pace]) -> Pace:
    seconds = {part: sum(each.seconds[part] for each in paces) for part in paces[0].seconds}
    return Pace(sum(each.tokens for each in paces), seconds)
