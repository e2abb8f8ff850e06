"""Stored matrices [out, in], packed a slice at a time by packing.cpp; `pack.pack` is its oracle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.checkpoint import TensorInfo
from penstock.engine.kernels.cpu.build import library
from penstock.engine.kernels.cpu.layout import Kind
from penstock.engine.kernels.cpu.packed import LANES
from penstock.engine.kernels.cpu.packed_file import Place, Record
from penstock.engine.kernels.groups import GROUP
from penstock.engine.kernels.rounding import keeps_groups
from penstock.engine.layers.stacks import Stack
from penstock.engine.layers.stored import STORED, open_stored, read_into

_SLICED = ("float32", "bfloat16", "int8", "int4")
_SLICE_BYTES = 4 << 20
"""Stored bytes that are packed at a time. They stay in the processor's cache together with the result."""
_WORD = 128
"""Bytes that a checksum takes in at a time."""
GROUP_BYTES = LANES * (2 + GROUP // 2)
"""Of a group of int4 in a panel: scales and numbers."""
BLOCK_BYTES = 1 << 20
"""Bytes of a block, which has a checksum of its own."""


class Packer:
    """The compiled functions that pack and check. Any number of threads may call them; they release the interpreter
    lock."""

    def __init__(self, isa: str = "") -> None:
        """Raises NotBuilt."""
        found = library(isa)
        self._pack, self._regroup, self._sum = found.penstock_pack, found.penstock_regroup, found.penstock_checksum

    def pack(self, rows: Tensor, kind: str, data: Tensor, scale: Tensor | None = None) -> None:
        """Packs `rows` [count, in], as they are stored, into `data` and, for int8, `scale`: the fields of a Packed."""
        count, inputs = rows.shape
        if not rows.is_contiguous() or inputs % 2:
            raise ValueError(f"rows must be contiguous and of an even length, not {inputs}")
        zeros = torch.zeros(inputs)
        at = None if scale is None else scale.data_ptr()
        kinds = Kind.of(rows.dtype), Kind.of(kind)
        self._pack(rows.data_ptr(), count, inputs, *kinds, data.data_ptr(), at, zeros.data_ptr())

    def regroup(self, rows: Tensor, scale: Tensor, data: Tensor) -> None:
        """Packs `rows`, uint8 [count, in / 2] of two numbers each as I4 is stored, as int4 into `data`; `scale` is
        bfloat16 [count, groups of 32]."""
        count, pairs = rows.shape
        if scale.shape != (count, -(-pairs * 2 // GROUP)) or not (rows.is_contiguous() and scale.is_contiguous()):
            raise ValueError(f"scales of {list(scale.shape)} are not those of {count} rows of {pairs * 2} numbers")
        self._regroup(rows.data_ptr(), count, pairs * 2, scale.data_ptr(), data.data_ptr())

    def checksums(self, data: Tensor, threads: int = 1) -> bytes:
        """8 bytes for each block of BLOCK_BYTES, the last one may be shorter. `data` is uint8, a multiple of 128
        long."""
        size = data.numel()
        if size % _WORD or not data.is_contiguous() or data.dtype != torch.uint8:
            raise ValueError(f"checksums are of a multiple of {_WORD} bytes, not of {size} {data.dtype}")
        blocks = -(-size // BLOCK_BYTES)
        sums, base = np.zeros(blocks, np.uint64), data.data_ptr()

        def some(first: int) -> None:
            begin, end = first * BLOCK_BYTES, min((first + share) * BLOCK_BYTES, size)
            self._sum(base + begin, end - begin, BLOCK_BYTES, sums[first:].ctypes.data)

        share = max(1, -(-blocks // threads))
        with ThreadPoolExecutor(threads) as executor:
            list(executor.map(some, range(0, blocks, share)))
        return sums.tobytes()


def naive_checksums(data: Tensor) -> bytes:
    """Computes what `Packer.checksums` does, the slow way: its oracle."""
    words = data.numpy().view(np.uint32).reshape(-1, _WORD // 4)
    sums = []
    for first in range(0, len(words), BLOCK_BYTES // _WORD):
        running = np.zeros(_WORD // 4, np.uint32)
        for row in words[first : first + BLOCK_BYTES // _WORD]:
            running = running * np.uint32(0x9E3779B1) + row
        total = 0
        for lane in running.tolist():
            total = (total * 0x9E3779B97F4A7C15 + lane) % 2**64
        sums.append(total)
    return np.array(sums, np.uint64).tobytes()


def sliced(stack: Stack, kind: str) -> bool:
    """Whether `pack_slices` can pack this matrix; `pack.pack` packs all others, whole."""
    plain = not stack.turned and all(part.scale is None for part in stack.parts)
    plain = plain or (kind == "int4" and keeps_groups(stack))
    return foreseen(stack, kind) and plain and len({part.dtype for part in stack.parts}) == 1


def foreseen(stack: Stack, kind: str) -> bool:
    """Whether `plan` knows the size of this matrix, however it is packed."""
    return kind in _SLICED and stack.inputs % 2 == 0


def plan(stacks: Sequence[Stack], kinds: Mapping[str, str], at: int) -> tuple[dict[str, Record], int]:
    """Plans where the packed matrices go, one behind the other from byte `at` on; returns that and where they end.
    `kinds` are theirs, by name."""
    records: dict[str, Record] = {}
    for stack in stacks:
        panels, pairs, kind = -(-stack.columns // LANES), stack.inputs // 2, kinds[stack.name]
        shape: tuple[int, ...] = (panels, pairs, LANES, 2) if kind == "bfloat16" else (panels, pairs, 2, LANES)
        if kind == "int4":
            shape = (panels, -(-stack.inputs // GROUP), GROUP_BYTES)
        data = Place("uint8" if kind == "int4" else kind, shape, at)
        at = data.end
        scale = Place("float32", (panels * LANES,), at) if kind == "int8" else None
        at = at if scale is None else scale.end
        records[stack.name] = {
            "kind": kind,
            "inputs": stack.inputs,
            "outputs": panels * LANES,
            "data": data,
            "scale": scale,
        }
    return records, at


Write = Callable[[int, Tensor], None]
"""Writes bytes to a place."""


def pack_slices(
    packer: Packer, stacks: Sequence[Stack], records: Mapping[str, Record], *, threads: int, write: Write
) -> None:
    """Packs the matrices that `plan` has planned; `threads` threads call `write`. Raises CheckpointError."""
    with ExitStack() as closing:
        tensors = [info for stack in stacks for part in stack.parts for info in (part, part.scale) if info is not None]
        files = {file: _open(file, closing) for file in {info.file for info in tensors}}
        work = iter([(stack, *rows) for stack in stacks for rows in _cut(stack)])

        def some(_: int) -> None:
            worker = _Slices(packer, files, records, write)
            for stack, first, last in work:  # the shared iterator gives each slice to one thread
                worker.pack(stack, first, last)

        with ThreadPoolExecutor(threads) as executor:
            list(executor.map(some, range(threads)))


def _cut(stack: Stack) -> Iterator[tuple[int, int]]:
    step = max(1, _SLICE_BYTES // (stack.parts[0].nbytes // stack.parts[0].shape[0]) // LANES) * LANES
    for first in range(0, stack.columns, step):
        yield first, min(first + step, stack.columns)


def _open(file: Path, closing: ExitStack) -> int:
    descriptor = open_stored(file)
    closing.callback(os.close, descriptor)
    return descriptor


class _Slices:
    """Packs slices in one thread, with buffers of its own."""

    def __init__(self, packer: Packer, files: dict[Path, int], records: Mapping[str, Record], write: Write) -> None:
        self._packer = packer
        self._files = files
        self._records = records
        self._write = write
        self._room: dict[str, Tensor] = {}

    def pack(self, stack: Stack, first: int, last: int) -> None:
        """Packs the columns [first, last) of `stack`; `first` is a multiple of 16."""
        record = self._records[stack.name]
        row_bytes = stack.parts[0].nbytes // stack.parts[0].shape[0]
        stored = self._take("rows", (last - first) * row_bytes)
        self._read(stack.parts, first, last, stored.numpy().data)
        rows = stored.view(STORED[stack.parts[0].dtype]).view(last - first, -1)
        place, scales, kind = record["data"], record["scale"], record["kind"]
        assert isinstance(place, Place) and isinstance(kind, str)
        panels, panel_bytes = -(-(last - first) // LANES), place.nbytes // place.shape[0]
        packed = self._take("packed", panels * panel_bytes)
        scale = torch.empty(panels * LANES) if isinstance(scales, Place) else None
        if stack.parts[0].dtype == "I4":
            self._packer.regroup(rows, self._scales(stack, first, last), packed)
        else:
            self._packer.pack(rows, kind, packed, scale)
        self._write(place.at + first // LANES * panel_bytes, packed)
        if isinstance(scales, Place) and scale is not None:
            self._write(scales.at + first * 4, scale.view(torch.uint8))

    def _take(self, name: str, nbytes: int) -> Tensor:
        """The buffer `name`, reused for the next slice; only the last slices of matrices are smaller."""
        room = self._room.get(name)
        if room is None or room.numel() < nbytes:
            room = self._room[name] = torch.empty(nbytes, dtype=torch.uint8)
        return room[:nbytes]

    def _scales(self, stack: Stack, first: int, last: int) -> Tensor:
        """Of the rows [first, last) of an int4 stack, one for each group of 32."""
        parts = [part.scale for part in stack.parts if part.scale is not None]
        stored = torch.empty((last - first) * parts[0].nbytes // parts[0].shape[0], dtype=torch.uint8)
        self._read(parts, first, last, stored.numpy().data)
        some, before = stack.parts[0].grid[1] // GROUP, stack.parts[0].phase[1] // GROUP
        each = stored.view(torch.bfloat16).view(last - first, -1).repeat_interleave(some, 1)
        return each[:, before : before - (-stack.inputs // GROUP)].contiguous()

    def _read(self, parts: Sequence[TensorInfo], first: int, last: int, room: memoryview) -> None:
        """Reads the stored rows [first, last) of matrices that stand one above the other."""
        begin = 0
        for part in parts:
            height, row_bytes = part.shape[0], part.nbytes // part.shape[0]
            here = range(max(first, begin) - begin, min(last, begin + height) - begin)
            if here:
                size = len(here) * row_bytes
                read_into(part, self._files[part.file], room[:size], here)
                room = room[size:]
            begin += height
