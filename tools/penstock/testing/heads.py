"""Draft heads with weights at random, for the tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.models.head import HeadNet, HeadShape
from penstock.models.net import NetShape
from penstock.models.teach import export_head

HEAD_VOCABULARY = 200
"""Tokens that a drawn head can guess."""


def drawn_head(seed: int = 0, vocabulary: int = 320) -> HeadNet:
    """A head for the model of `vocabulary` tokens that `write_checkpoint` makes. It is nearly always wrong."""
    body = NetShape(1, 64, 48, 4, 2, vocabulary=vocabulary, head=16, theta=1e4, context=1024)
    random = torch.Generator().manual_seed(seed)
    known = torch.zeros(body.vocabulary, dtype=torch.bool)
    known[torch.randperm(body.vocabulary, generator=random)[:HEAD_VOCABULARY]] = True
    head = HeadNet(HeadShape((1, 2), body, HEAD_VOCABULARY), known)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0, 0.25, generator=random).add_(parameter.ndim == 1)
    return head


def write_head(directory: Path, seed: int = 0, vocabulary: int = 320) -> Path:
    """Fills `directory` (made if missing) and returns it."""
    export_head(drawn_head(seed, vocabulary), directory)
    return directory
