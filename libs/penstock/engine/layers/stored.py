"""Tensors as checkpoints store them, and the numbers that they stand for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from penstock.checkpoint import CheckpointError, TensorInfo

STORED = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I4": torch.uint8,
}
"""The types of tensors in memory; I4 are bytes of two numbers each, the first in the lower bits."""


def typed(info: TensorInfo, content: Tensor) -> Tensor:
    """The tensor of uint8 [info.nbytes] in its stored type: `info.shape`, or, of I4, rows of half as many bytes."""
    shape = (*info.shape[:-1], -1) if info.dtype == "I4" else info.shape
    return content.view(STORED[info.dtype]).view(shape)


def numbers(info: TensorInfo, read: Callable[[TensorInfo], Tensor]) -> Tensor:
    """What the tensor's bytes stand for, `info.shape`: as it is stored, or, where it has scales, float32 in new memory.
    `read` brings a tensor's bytes, in any type."""
    stored = read(info)
    if info.scale is None:
        return stored
    if info.dtype == "I4":
        pairs = stored.contiguous().view(torch.uint8).view(info.shape[0], -1)
        wide = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1).float().sub_(8)
    else:
        wide = stored.float()
    scale = read(info.scale).to(wide.device, torch.float32)
    for axis, (size, extent) in enumerate(zip(info.grid, info.shape, strict=True)):
        scale = scale.repeat_interleave(size, axis).narrow(axis, info.phase[axis], extent)
    return wide.mul_(scale)


def read_tensor(part: TensorInfo) -> Tensor:
    """The tensor as it is stored. Raises CheckpointError."""
    found = torch.empty(part.nbytes, dtype=torch.uint8)
    file = open_stored(part.file)
    try:
        read_into(part, file, found.numpy().data)
    finally:
        os.close(file)
    return typed(part, found)


def open_stored(file: Path) -> int:
    """Raises CheckpointError."""
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(file, f"cannot be read: {error.strerror}") from None


def read_into(part: TensorInfo, file: int, room: memoryview, some: range | None = None) -> None:
    """Fills `room` with the tensor, or with `some` consecutive indices of its first axis, out of its open file. Raises
    CheckpointError."""
    for at, size in part.ranges(some):
        _read_at(part, file, at, room[:size])
        room = room[size:]


def _read_at(part: TensorInfo, file: int, at: int, room: memoryview) -> None:
    """Fills `room` from byte `at` of the file on."""
    while room:
        try:
            count = os.preadv(file, [room], at)
        except OSError as error:
            raise CheckpointError(part.file, f"cannot be read: {error.strerror}") from None
        if not count:
            raise CheckpointError(part.file, f"is cut short: it ends at byte {at}, inside tensor {part.name}")
        room, at = room[count:], at + count
