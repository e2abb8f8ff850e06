"""Training a draft head on its target's own distributions, and writing it as published checkpoints are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from .data import BatchStream, DocumentStream, Source, TrainingBatch
from .export import shape_of, write_weights
from .head import HeadNet, HeadShape, initialise_head
from .net import Net
from .optim import Optimizer
from .presets import HeadPlan
from .train import Progress, Report, computing_clock, rate_at

_AGAIN = 0.8
"""What a guess weighs beside the one before it."""
_REACHES = (16, 64, 256, 1024)
"""How many rows it may look back in training: where it is used it has not always seen the whole text."""


_TIMES = 3
"""How often a lesson is learned, on average."""
_LESSONS = 256
"""Lessons that are kept."""


class HeadTrainer:
    """One head on its way through a plan, for a target that stays as it is."""

    def __init__(
        self,
        plan: HeadPlan,
        target: Net,
        tokenizer: Tokenizer,
        *,
        start: HeadNet | None = None,
        library: Source | None = None,
    ) -> None:
        """`start` is a head to go on from; its own shape counts then."""
        self.plan = plan
        self.target = target.requires_grad_(False)
        self.progress = Progress()
        self._stream = _stream(plan, tokenizer, library)
        self._random = Random(plan.run.seed)
        self._lessons: list[Lesson] = []
        self.head = self._new(tokenizer, library) if start is None else start
        self._optimizer = Optimizer(self.head.named_parameters())

    def _new(self, tokenizer: Tokenizer, library: Source | None) -> HeadNet:
        """A head that has learned nothing; the commonest tokens are its vocabulary."""
        plan, target = self.plan, self.target
        shape = replace(plan.run.shape, width=target.shape.width, vocabulary=target.shape.vocabulary)
        counted = _stream(plan, tokenizer, library)
        known = commonest([counted.next(0.5) for _ in range(plan.counted)], shape.vocabulary, plan.draft_vocabulary)
        head = HeadNet(HeadShape(plan.layers, shape, plan.draft_vocabulary), known)
        initialise_head(head, target, plan.run.seed)
        return head

    def run(self, report: Report) -> HeadNet:
        """To the end of the plan; tells `report` of every step."""
        computed = computing_clock(torch.device("cpu"))
        while self.progress.fraction(self.plan.run) < 1.0:
            began = computed()
            loss = self._step()
            self.progress.count(computed() - began, loss)
            report(self.progress, "")
        return self.head

    def _step(self) -> float:
        plan, progress = self.plan.run, self.progress
        lesson = self._lesson()
        loss = head_loss(self.head, lesson, self.plan.steps, self._random.choice(_REACHES))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self._optimizer.step(rate_at(plan, progress))
        progress.steps += 1
        progress.tokens += lesson.tokens
        return loss.item()

    def _lesson(self) -> Lesson:
        """A new one, or one of those before: the target costs more than its head."""
        if self._lessons and self._random.random() < 1 - 1 / _TIMES:
            return self._random.choice(self._lessons)
        batch = self._stream.next(self.progress.fraction(self.plan.run))
        self._lessons.append(Lesson(self.target, batch, self.head.shape.layers))
        del self._lessons[:-_LESSONS]
        return self._lessons[-1]


def _stream(plan: HeadPlan, tokenizer: Tokenizer, library: Source | None) -> BatchStream:
    return BatchStream(DocumentStream(tokenizer, plan.run.stages, plan.run.seed, library), plan.run.batch)


def commonest(batches: Sequence[TrainingBatch], vocabulary: int, count: int) -> Tensor:
    """bool [vocabulary]: the `count` tokens that are to be guessed most often."""
    seen = Counter(dict.fromkeys(range(vocabulary), 0))
    for batch in batches:
        seen.update(batch.targets.tolist())
    known = torch.zeros(vocabulary, dtype=torch.bool)
    known[[token for token, _ in seen.most_common(count)]] = True
    return known


class Lesson:
    """What a head learns from one batch: the target's features and, where tokens count, what it says comes next."""

    @torch.no_grad()
    def __init__(self, target: Net, batch: TrainingBatch, layers: Sequence[int]) -> None:
        features, last = target.features(batch.ids, layers)
        self.tokens = batch.tokens
        self.features = features.bfloat16()
        self.embedded = target.model.embed_tokens(F.pad(batch.ids[:, 1:], (0, 1)))
        length = batch.ids.shape[1]
        self.logits: list[Tensor] = []
        self.places: list[Tensor] = []
        """Of each text, the tokens behind which the target says something that counts."""
        self.weights: list[Tensor] = []
        self.ids = batch.ids
        for text in range(len(batch.ids)):
            own = batch.keep // length == text
            self.places.append(batch.keep[own] % length)
            self.weights.append(batch.weights[own])
            self.logits.append(target.logits(last[text, self.places[-1]]).bfloat16())

    def rows(self, text: int, steps: int) -> Tensor:
        """The rows that guess any of these within so many steps: row t guesses what follows token t + 1 at first."""
        length = self.features.shape[1]
        rows = torch.zeros(length, dtype=torch.bool)
        for step in range(steps):
            first = self.places[text] - 1 - step
            rows[first[first >= 0]] = True
        return rows.nonzero().flatten()


def head_loss(head: HeadNet, lesson: Lesson, steps: int, reach: int) -> Tensor:
    """How far the head's distributions are from the target's where tokens count, for 1 to `steps` guesses in a row."""
    wanted = [lesson.rows(text, steps) for text in range(len(lesson.ids))]
    states = head(lesson.features.float(), lesson.embedded, steps, reach, wanted)
    total, weight = torch.zeros(()), torch.zeros(())
    for text, rows in enumerate(wanted):
        places = lesson.places[text]
        shares = lesson.logits[text].float().softmax(-1)[:, head.t2d]
        weights = lesson.weights[text] * shares.sum(-1)
        aims = (shares / shares.sum(-1, keepdim=True).clamp_min(1e-6)).clamp_min(1e-9).log()
        weight = weight + lesson.weights[text].sum()
        for step in range(steps):
            known = places > step
            own = torch.searchsorted(rows, places[known] - 1 - step)
            found = head.logits(states[step][text][own]).log_softmax(-1)
            distances = F.kl_div(found, aims[known], reduction="none", log_target=True).sum(-1)
            total = total + _AGAIN**step * (distances * weights[known]).sum()
    return total / weight


@torch.no_grad()
def acceptance(head: HeadNet, lesson: Lesson, steps: int, reach: int) -> list[tuple[int, int]]:
    """For 1 to `steps` greedy guesses in a row: how many were the target's own, and how many there were, of those
    behind right ones. They go on from the text, so those behind a token that is not the target's are left out."""
    counts = [[0, 0] for _ in range(steps)]
    wanted = [lesson.rows(text, steps) for text in range(len(lesson.ids))]
    states = head(lesson.features.float(), lesson.embedded, steps, reach, wanted)
    for text, rows in enumerate(wanted):
        own = dict(zip(lesson.places[text].tolist(), lesson.logits[text].float().argmax(-1).tolist(), strict=True))
        ids = lesson.ids[text].tolist()
        guesses = [head.guess(states[step][text]).tolist() for step in range(steps)]
        for number, row in enumerate(rows.tolist()):
            for step in range(steps):
                choice = own.get(row + 1 + step)
                if choice is None:
                    break
                counts[step][1] += 1
                right = guesses[step][number] == choice
                counts[step][0] += right
                if not right or row + 2 + step >= len(ids) or ids[row + 2 + step] != choice:
                    break
    return [(right, seen) for right, seen in counts]


def measure_head(
    head: HeadNet, target: Net, tokenizer: Tokenizer, plan: HeadPlan, *, steps: int = 6, batches: int = 20
) -> dict[int, list[float]]:
    """Shares of right ones behind right ones of 1 to `steps` greedy guesses in a row, by how far the head looks back;
    on sessions that training did not see."""
    stream = _stream(replace(plan, run=replace(plan.run, seed=plan.run.seed + 1000)), tokenizer, None)
    lessons = [Lesson(target, stream.next(1.0), head.shape.layers) for _ in range(batches)]
    found = {}
    for reach in (8, 32, 512):
        counts = [acceptance(head, lesson, steps, reach) for lesson in lessons]
        sums = [tuple(map(sum, zip(*place, strict=True))) for place in zip(*counts, strict=True)]
        found[reach] = [right / max(1, seen) for right, seen in sums]
    return found


def export_head(head: HeadNet, directory: Path) -> None:
    """Writes weights in bfloat16 and config.json into `directory`, in the layout of published EAGLE-3 checkpoints."""
    shape, body = head.shape, head.shape.body
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": body.vocabulary,
        "draft_vocab_size": shape.draft_vocabulary,
        "hidden_size": body.width,
        "intermediate_size": body.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": body.heads,
        "num_key_value_heads": body.kv_heads,
        "head_dim": body.head,
        "hidden_act": "silu",
        "max_position_embeddings": body.context,
        "rms_norm_eps": body.epsilon,
        "rope_theta": body.theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [count - 1 for count in shape.layers]},
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_weights(directory, {**dict(head.named_parameters()), "d2t": head.d2t, "t2d": head.t2d})


def load_head(directory: Path) -> HeadNet:
    """A head that `export_head` has written, in float32."""
    config = json.loads((directory / "config.json").read_text())
    body = shape_of(config)
    tensors = load_file(directory / "model.safetensors")
    layers = tuple(each + 1 for each in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    head = HeadNet(HeadShape(layers, body, config["draft_vocab_size"]), tensors["t2d"])
    head.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in tensors.items()})
    return head
