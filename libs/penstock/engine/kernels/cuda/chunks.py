"""How a checkpoint's bytes are brought to a device: pieces of bounded size, dealt to lanes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint import Checkpoint, TensorInfo


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one tensor."""

    tensor: int
    """Its number in the order of loading."""
    file: Path
    offset: int
    """In the file."""
    at: int
    """In the tensor's bytes."""
    size: int


def deal(tensors: Sequence[TensorInfo], chunk_bytes: int, lanes: int) -> list[list[Chunk]]:
    """The work of each lane, in the order of loading: each piece goes to the lane that has the least so far, so that
    lanes end together and a large tensor is brought by all of them."""
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
    """All tensors, about as loading asks for them: the embedding and the head, the layers, the rest."""

    def rank(name: str) -> tuple[int, int]:
        if name.startswith("model.layers."):
            return (2, int(name.split(".")[2]))
        return (0, 0) if name.startswith(("model.embed_tokens.", "lm_head.")) else (3, 0)

    return [checkpoint.tensors[name] for name in sorted(checkpoint.tensors, key=rank)]
