"""Training one network: batches in, checkpoints out, and a restart takes up exactly where the last one stopped.

A batch is a number of documents. It is computed piece by piece, each piece packed into one row (`packed`), and steps
the parameters once.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from . import tokenizer as tokenizers_
from .ahead import SharedStream
from .captured import CapturedUpdate
from .data import DocumentStream, PackedBatch, Source, TokenizedDocument, pack
from .induction import initialise
from .measure import exact, held_out_documents
from .native import kernels_for
from .net import Net
from .optim import Optimizer
from .packed import PackedNet
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

    def count(self, seconds: float, loss: float) -> None:
        """Note a step: the seconds that it took, and its loss in a moving mean."""
        self.seconds += seconds
        self.loss += (loss - self.loss) * (1.0 if self.steps == 1 else 0.02)

    def fraction(self, plan: TrainingPlan) -> float:
        return min(1.0, max(self.seconds / (60 * (plan.minutes or math.inf)), self.tokens / plan.tokens))


PIECE = 8192
"""Tokens that are computed at once, give or take a document."""

Loss = Callable[[PackedNet, PackedBatch], Tensor]  # the weighted sum over the tokens that count
Report = Callable[[Progress, str], None]


def learn_tokenizer(preset: Preset, path: Path) -> Tokenizer:
    """The tokenizer of a run: read from `path`, or learned from the generator and the plain text and put there."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    side, library = Side(evaluation=False), Library(evaluation=False)
    kinds = [k for k in MAKERS if k not in ("long", "huge", "vast", "select")]

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


def pieces(samples: Sequence[TokenizedDocument], tokens: int = PIECE) -> list[PackedBatch]:
    """A batch of documents, in their order, as packed pieces of about so many tokens. Weights are made shares of the
    whole batch's, so that the pieces' losses and gradients sum up to the batch's mean."""
    groups: list[list[TokenizedDocument]] = []
    room = 0
    for sample in samples:
        if room <= 0:
            groups.append([])
            room = tokens
        groups[-1].append(sample)
        room -= len(sample.ids)
    packed = [pack(group) for group in groups]
    total = sum(float(piece.weights.sum()) for piece in packed)
    return [replace(piece, weights=piece.weights / total) for piece in packed]


def rate_at(plan: TrainingPlan, progress: Progress) -> float:
    """Warm-up by steps, then full, then a linear decay to the plan's floor by the end of the budget."""
    warm = min(1.0, (progress.steps + 1) / plan.warmup)
    left = (1 - progress.fraction(plan)) / (1 - plan.hold)
    return plan.rate * warm * (plan.floor + (1 - plan.floor) * min(1.0, left))


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def computing_clock(where: torch.device) -> Callable[[], float]:
    """A clock for budgets, in seconds of computing. On a CPU it counts processor time over threads, so that other work
    on the machine makes a run later, not shorter."""
    if where.type == "cuda":
        return time.monotonic
    return lambda: time.process_time() / torch.get_num_threads()


@dataclass(frozen=True)
class Drawn:
    """A batch of a run, and where its stream stands after it."""

    pieces: Sequence[PackedBatch]
    tokens: int
    drawn: int


class Stopwatch:
    """The seconds that each part of the work took."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began  # type: ignore[assignment]


class Trainer:
    """One network on its way through a plan. `directory` holds its checkpoint and belongs to it alone. Documents are
    drawn by so many `processes`: unless told, by this one beside a CPU's computing, and by one for each core but one
    where a GPU computes."""

    def __init__(
        self,
        plan: TrainingPlan,
        tokenizer: Tokenizer,
        directory: Path,
        *,
        loss: Loss = PackedNet.cross_entropy,
        start: Net | None = None,
        library: Source | None = None,
        processes: int | None = None,
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
        self.model = PackedNet(self.net, kernels_for(plan.shape, self.device))
        self.optimizer = Optimizer(self.net.named_parameters(), dtype=self.model.kernels.dtype)
        if processes is None:
            processes = max(1, len(os.sched_getaffinity(0)) - 1) if self.device.type == "cuda" else 0
        drawn_from = (tokenizer, plan.stages, plan.seed, library, plan.emphasis)
        self.stream = SharedStream(processes, *drawn_from) if processes else DocumentStream(*drawn_from)
        self.watch = Stopwatch()
        self.loss = loss
        self.captured = CapturedUpdate(self.model, self.optimizer, loss) if self.device.type == "cuda" else None
        self._drawn: Drawn | None = None
        directory.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._restore()

    @property
    def finished(self) -> bool:
        return self.progress.fraction(self.plan) >= 1.0

    def run(
        self, report: Report, save_every: float = 120.0, measure_every: float = 600.0, until: float = math.inf
    ) -> Net:
        """Train to the end of the plan, or to the time `until` (of time.monotonic), telling `report` of every step and
        every measurement; returns the network.

        A kill loses at most `save_every` seconds.
        """
        computed = computing_clock(self.device)
        now = saved = measured = time.monotonic()
        while not self.finished and now < until:
            began = computed()
            loss = self.step()
            now = time.monotonic()
            self.progress.count(computed() - began, loss)
            report(self.progress, "")
            if now - saved > save_every:
                self.save()
                saved = now
            if now - measured > measure_every:
                report(self.progress, self.measure())
                measured = time.monotonic()
        self.save()
        self.stream.close()
        return self.net

    def measure(self) -> str:
        """Held-out exactness in a line; few documents, to see where training stands."""
        scores = exact(self.net, self.tokenizer, held_out_documents(("L1", "L3", "everyday", "json"), 12, 7), 2000)
        return "  ".join(f"{k} {r / n:.2f}" for k, (r, n) in scores.items() if not k.endswith("answer"))

    def step(self) -> float:
        """One update from one batch; returns its loss, the mean over the tokens that count."""
        progress, rate = self.progress, rate_at(self.plan, self.progress)
        with self.watch.part("data"):
            batch = self._drawn or self._draw()
        progress.steps += 1
        progress.tokens += batch.tokens
        progress.drawn = batch.drawn
        if self.captured is None:
            self._drawn = None
            return self._computed(batch.pieces, rate)
        with self.watch.part("launch"):
            self.captured.launch(batch.pieces[0], rate)
        with self.watch.part("data"):
            self._drawn = self._draw()
        with self.watch.part("wait"):
            return self.captured.result()

    def _draw(self) -> Drawn:
        """The next batch, in one piece where a GPU computes."""
        samples = self.stream.take(self.progress.fraction(self.plan), self.plan.batch)
        batch = pieces(samples, PIECE if self.captured is None else sys.maxsize)
        return Drawn(batch, sum(piece.tokens for piece in batch), self.stream.drawn)

    def _computed(self, batch: Sequence[PackedBatch], rate: float) -> float:
        """An update, piece by piece; returns the loss."""
        watch, loss = self.watch, 0.0
        for piece in batch:
            with watch.part("forward"):
                part = self.loss(self.model, piece.to(self.device))
                loss += part.item()
            with watch.part("backward"):
                part.backward()  # type: ignore[no-untyped-call]
        with watch.part("optimizer"):
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step(rate)
        return loss

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
