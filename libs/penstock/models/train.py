"""Training one network: batches in, checkpoints out, and a restart takes up where the last one stopped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from . import tokenizer as tokenizers_
from .data import BatchStream, Source, TrainingBatch
from .induction import initialise
from .measure import exact, held_out_documents
from .net import Net
from .optim import Optimizer
from .presets import Preset, TrainingPlan
from .sessions import MAKERS, make
from .text import Library
from .words import Side


@dataclass
class Progress:
    """Where a run is; kept in the checkpoint beside the tensors."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    drawn: int = 0
    loss: float = 0.0

    def fraction(self, plan: TrainingPlan) -> float:
        return min(1.0, max(self.seconds / (60 * plan.minutes), self.tokens / plan.tokens))


Loss = Callable[[Net, TrainingBatch], Tensor]
Report = Callable[[Progress, str], None]


def learn_tokenizer(preset: Preset, path: Path) -> Tokenizer:
    """The tokenizer of a run: read from `path`, or learned from the generator and the plain text and put there."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    side, library = Side(evaluation=False), Library(evaluation=False)
    kinds = [k for k in MAKERS if k not in ("long", "huge", "select")]

    def texts() -> list[str]:
        out = []
        for i in range(preset.tokenizer_documents):
            rng = Random(f"tokenizer:{i}")
            text = library.document(rng).text if i % 3 == 0 else make(rng.choice(kinds), rng, side).text
            for special in tokenizers_.SPECIAL:
                text = text.replace(special, "")
            out.append(text)
        return out

    tokenizer = tokenizers_.train(texts(), preset.vocabulary)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def cross_entropy(net: Net, batch: TrainingBatch) -> Tensor:
    """The weighted loss on the tokens that count."""
    losses = F.cross_entropy(net(batch.ids, batch.keep), batch.targets, reduction="none")
    return (losses * batch.weights).sum() / batch.weights.sum()


def rate_at(plan: TrainingPlan, progress: Progress) -> float:
    """Warm-up by steps, then full, then a linear decay to the plan's floor by the end of the budget."""
    warm = min(1.0, (progress.steps + 1) / plan.warmup)
    left = (1 - progress.fraction(plan)) / (1 - plan.hold)
    return plan.rate * warm * (plan.floor + (1 - plan.floor) * min(1.0, left))


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def precision(device: torch.device) -> torch.autocast:
    """Autocast to bfloat16 where the hardware multiplies it; plain float32 on processors that emulate it."""
    fast = device.type == "cuda" or torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


class Trainer:
    """One network on its way through a plan. `directory` holds its checkpoint and belongs to it alone."""

    def __init__(
        self,
        plan: TrainingPlan,
        tokenizer: Tokenizer,
        directory: Path,
        *,
        loss: Loss = cross_entropy,
        start: Net | None = None,
        library: Source | None = None,
    ) -> None:
        self.plan = plan
        self.tokenizer = tokenizer
        self.path = directory / "checkpoint.safetensors"
        self.device = device()
        self.progress = Progress()
        self.net = Net(plan.shape)
        if start is None:
            initialise(self.net, plan.seed)
        else:
            self.net.load_state_dict(start.state_dict())
        self.net.to(self.device)
        self.optimizer = Optimizer(self.net.named_parameters())
        self.stream = BatchStream(tokenizer, plan.stages, plan.seed, plan.batch, library)
        self.loss = loss
        directory.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._restore()

    @property
    def finished(self) -> bool:
        return self.progress.fraction(self.plan) >= 1.0

    def run(self, report: Report, save_every: float = 120.0, measure_every: float = 600.0) -> Net:
        """Train to the end of the plan, telling `report` of every step and every measurement; returns the network.

        A kill loses at most `save_every` seconds.
        """
        last = saved = measured = time.monotonic()
        while not self.finished:
            loss = self._step()
            now = time.monotonic()
            progress = self.progress
            progress.seconds += now - last
            progress.loss += (loss - progress.loss) * (1.0 if progress.steps == 1 else 0.02)
            last = now
            report(progress, "")
            if now - saved > save_every:
                self.save()
                saved = now
            if now - measured > measure_every:
                report(progress, self.measure())
                measured = last = time.monotonic()
        self.save()
        return self.net

    def measure(self) -> str:
        """Held-out exactness in a line; few documents, to see where training stands."""
        scores = exact(self.net, self.tokenizer, held_out_documents(("L1", "L3", "everyday", "json"), 12, 7), 2000)
        return "  ".join(f"{k} {r / n:.2f}" for k, (r, n) in scores.items() if not k.endswith("answer"))

    def _step(self) -> float:
        progress = self.progress
        batch = self.stream.next(progress.fraction(self.plan)).to(self.device)
        with precision(self.device):
            loss = self.loss(self.net, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step(rate_at(self.plan, progress))
        progress.steps += 1
        progress.tokens += batch.tokens
        progress.drawn = self.stream.drawn
        return loss.item()

    def save(self) -> None:
        """Write the checkpoint; it replaces the last one only when complete."""
        tensors = {f"net.{n}": p.detach() for n, p in self.net.named_parameters()}
        tensors |= {f"optimizer.{n}": t for n, t in self.optimizer.state().items()}
        partial = self.path.with_suffix(".part")
        save_file(
            {n: t.cpu().contiguous() for n, t in tensors.items()},
            partial,
            {"progress": json.dumps(asdict(self.progress))},
        )
        os.replace(partial, self.path)

    def _restore(self) -> None:
        with safe_open(self.path, "pt", device=str(self.device)) as file:
            self.progress = Progress(**json.loads(file.metadata()["progress"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self.net.load_state_dict({n.removeprefix("net."): t for n, t in tensors.items() if n.startswith("net.")})
        self.optimizer.restore(
            {n.removeprefix("optimizer."): t for n, t in tensors.items() if n.startswith("optimizer.")}
        )
        self.stream.drawn = self.progress.drawn
