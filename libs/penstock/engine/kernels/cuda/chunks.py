"""Cuts a checkpoint into chunks of bounded size and deals them to lanes, which bring them to a device. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint import Checkpoint, TensorInfo, layer_of


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of bytes of one tensor."""

    tensor: int
    """The tensor's number in the order of loading."""
    file: Path
    offset: int
    """Where it begins in the file."""
    at: int
    """Where it begins in the tensor."""
    size: int


def deal(tensors: Sequence[TensorInfo], chunk_bytes: int, lanes: int) -> list[list[Chunk]]:
    """The work of each lane, in the order of loading. Each chunk goes to the lane with the least work so far, so that
    the lanes end together and share large tensors."""
    work: list[list[Chunk]] = [[] for _ in range(lanes)]
    load = [0] * lanes
    for number, info in enumerate(tensors):
        for at in range(0, info.nbytes, chunk_bytes):
            size = min(chunk_bytes, info.nbytes - at)
            lane = load.index(min(load))
            work[lane].append(Chunk(number, info.file, info.offset + at, at, size))
            load[lane] += size
    return work


def in_order(checkpoint: Checkpoint) -> list[TensorInfo]:
    """All tensors, roughly in the order in which loading asks for them: embedding and head, layers, the rest."""

    def rank(name: str) -> tuple[int, int]:
        if (layer := layer_of(name)) is not None:
            return 2, layer
        return (0, 0) if name.startswith(("model.embed_tokens.", "lm_head.")) else (3, 0)

    found: list[TensorInfo] = []
    for name in sorted(checkpoint.tensors, key=rank):
        info = checkpoint.tensors[name]
        found += [info] if info.scale is None else [info, info.scale]
    return found
