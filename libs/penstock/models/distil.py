"""Distilling the draft: it learns the target's distribution, on sessions and on text that the target wrote."""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from .data import PackedBatch
from .native import kernels_for
from .net import Cache, Net
from .packed import PackedNet
from .render import PLAIN, Document
from .text import Library
from .train import Loss


def imitate(target: Net) -> Loss:
    """The loss of a draft: how far its distribution is from `target`'s, at the tokens that count."""
    target.requires_grad_(False)
    teacher = PackedNet(target, kernels_for(target.shape, next(target.parameters()).device))

    def loss(model: PackedNet, batch: PackedBatch) -> Tensor:
        with torch.no_grad():
            wanted = teacher.logits(batch).float().log_softmax(-1)
        got = model.logits(batch).float().log_softmax(-1)
        distances = F.kl_div(got, wanted, reduction="none", log_target=True).sum(-1)
        return (distances * batch.weights).sum()

    return loss


class OwnWords:
    """Plain text that the target continued by itself, as documents: what a draft will really have to guess."""

    def __init__(
        self,
        target: Net,
        tokenizer: Tokenizer,
        library: Library,
        *,
        seed: int,
        rows: int,
        start: int = 24,
        length: int = 72,
    ) -> None:
        rng, generator = Random(seed), torch.Generator().manual_seed(seed)
        self.texts: list[str] = []
        while len(self.texts) < rows:
            heads: list[list[int]] = []
            while len(heads) < 32:
                ids = tokenizer.encode(library.document(rng).text).ids
                if len(ids) >= start:
                    heads.append(ids[:start])
            written = _continue(target, torch.tensor(heads), length, generator)
            self.texts += [tokenizer.decode(row, skip_special_tokens=False) for row in written.tolist()]

    def document(self, rng: Random) -> Document:
        """One of the continued texts, up to where the target ended it."""
        text = rng.choice(self.texts).partition("<|endoftext|>")[0]
        doc = Document(kind="text")
        doc.label(doc.add(text, PLAIN), "text")
        doc.add("<|endoftext|>", PLAIN)
        return doc


@torch.no_grad()
def _continue(net: Net, ids: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Rows of equal length, each with `length` sampled tokens after it."""
    device = next(net.parameters()).device
    step, cache = ids.to(device), None
    for _ in range(length):
        hidden: Tensor
        kept: Cache
        hidden, kept = net.hidden(step, cache)
        cache = kept
        drawn = torch.multinomial(net.logits(hidden[:, -1]).softmax(-1).cpu(), 1, generator=generator)
        ids, step = torch.cat([ids, drawn], 1), drawn.to(device)
    return ids
