"""Training on a GPU: captured updates change a network as updates do that are computed one kernel after another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.models import embedded
from penstock.models.data import DocumentStream, pack
from penstock.models.native import kernels_for
from penstock.models.packed import PackedNet, TorchKernels
from penstock.models.presets import PRESETS
from penstock.models.tokenizer import load
from penstock.models.train import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PLAN = replace(PRESETS["mini"].seedling, batch=2048, tokens=10**6)


def trained(folder: Path, steps: int, *, captured: bool) -> tuple[Trainer, list[float]]:
    trainer = Trainer(PLAN, load(embedded("penstock-mini")), folder, processes=2)
    if not captured:
        trainer.captured = None
    losses = [trainer.step() for _ in range(steps)]
    trainer.stream.close()
    return trainer, losses


def test_attention_is_that_of_torch(tmp_path):
    trainer, _ = trained(tmp_path, 0, captured=True)
    piece = pack(DocumentStream(trainer.tokenizer, PLAN.stages, 5).take(0.0, 4000)).to(trainer.device)
    found = []
    for kernels in (kernels_for(PLAN.shape, trainer.device), TorchKernels(torch.bfloat16), TorchKernels(torch.float32)):
        loss = PackedNet(trainer.net, kernels).cross_entropy(piece)
        gradients = torch.autograd.grad(loss, list(trainer.net.parameters()))
        found.append((loss.item(), torch.cat([g.flatten() for g in gradients])))
    (loss, fast), (_, rounded), (exact, wanted) = found
    assert loss == pytest.approx(exact, rel=0.01)
    assert (fast - wanted).norm() < 1.3 * (rounded - wanted).norm()


def test_captured_updates_learn_what_others_learn(tmp_path):
    ways = [trained(tmp_path / str(captured), 30, captured=captured) for captured in (True, False)]
    (fast, found), (slow, wanted) = ways
    assert fast.progress.tokens == slow.progress.tokens and fast.progress.drawn == slow.progress.drawn
    assert found[0] == pytest.approx(wanted[0], rel=0.01)
    assert sum(found[-5:]) == pytest.approx(sum(wanted[-5:]), rel=0.05)
