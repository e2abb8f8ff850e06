"""The packed matrices of a checkpoint: mapped from the cache, packed into it, or packed in private memory."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.checkpoint import Checkpoint, TensorInfo, remembered_fingerprint
from penstock.engine.kernels.cpu.build import library
from penstock.engine.kernels.cpu.lossless import compressed, verbatim_share
from penstock.engine.kernels.cpu.memory import anonymous
from penstock.engine.kernels.cpu.pack import pack
from penstock.engine.kernels.cpu.packed import Packed
from penstock.engine.kernels.cpu.packed_cache import PackedCache
from penstock.engine.kernels.cpu.packed_file import (
    PAGE,
    Place,
    Record,
    finish,
    packed_of,
    record_of,
    write_bytes,
)
from penstock.engine.kernels.cpu.packing import Packer, Write, foreseen, pack_slices, plan, sliced
from penstock.engine.kernels.rounding import kind_of
from penstock.engine.layers.stacks import Stack
from penstock.engine.layers.stored import numbers, read_tensor
from penstock.engine.models.loading import all_stacks
from penstock.runtime.caches import cache_directory

CACHE_BYTES = 16 << 30
"""Default size of the cache of packed files on disk."""
SMALL_BYTES = 32 << 20
"""Models of fewer bytes are packed at every start: that takes no longer than finding and checking a file."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedWeights:
    matrices: Mapping[str, Packed]
    """The packed matrices by the names of their stacks."""
    nbytes: int
    shared: bool
    """Whether other processes of this host share the memory of the matrices."""
    packed: bool
    """Whether this start packed them; otherwise the cache had them already."""
    seconds: float

    def __str__(self) -> str:
        where = "shared" if self.shared else "private"
        how = "packed" if self.packed else "mapped"
        shares = [verbatim_share(packed) for packed in self.matrices.values() if packed.kind == "lossless"]
        lossless = f", lossless, {max(shares):.1%} verbatim at most" if shares else ""
        return f"{self.nbytes / 1e6:.0f} MB ({where}{lossless}), {how} in {self.seconds:.2f} s"


def packed_weights(
    checkpoint: Checkpoint, kind: str, dtype: torch.dtype, threads: int, cache_bytes: int
) -> PackedWeights:
    """The matrices of `checkpoint`, packed as `kind_of` says.

    They are kept on disk for the next start and for others, in a cache of at most `cache_bytes`. `dtype` is the
    type to which they are rounded first; only kinds that packing.cpp doesn't know need it. Raises CheckpointError and
    NotBuilt.
    """
    begin = time.monotonic()
    stacks, stored = list(all_stacks(checkpoint)), checkpoint.stores_int4
    kinds = {stack.name: kind_of(stack, kind, stored) for stack in stacks}
    if kind == "int4" and stored:
        kept = list(kinds.values()).count("int4")
        _log.info("%d of %d matrices stay in int4, the others in bfloat16", kept, len(kinds))
    job = _Job(stacks, kinds, dtype, threads, Packer())
    if cache_bytes and job.nbytes >= SMALL_BYTES:
        try:
            directory = cache_directory("packed")
            cache = PackedCache(directory, cache_bytes, lambda content: job.packer.checksums(content, threads))
            found = cache.obtain(_name(checkpoint, kind), job.nbytes, job.to_file)
            return PackedWeights(found.matrices, found.nbytes, True, found.made, time.monotonic() - begin)
        except OSError as error:
            reason = error.strerror or error
            _log.warning("the packed weights are kept in private memory; not in the cache, because: %s", reason)
    matrices = job.in_memory()
    nbytes = sum(_nbytes(packed) for packed in matrices.values())
    return PackedWeights(matrices, nbytes, False, True, time.monotonic() - begin)


def _name(checkpoint: Checkpoint, kind: str) -> str:
    """Of the file in the cache."""
    if (part := checkpoint.part) is None:
        return f"{remembered_fingerprint(checkpoint)[:32]}-{kind}"
    rank = part.rank
    groups = f"-in-{rank.expert_groups}" if rank.expert_groups > 1 else ""
    if rank.copies is not None:
        groups += f"-with-{hashlib.sha256(repr(rank.copies).encode()).hexdigest()[:16]}"
    layers = "" if rank.layers is None else f"-layers-{rank.layers.start}-{rank.layers.stop}"
    return f"{part.fingerprint[:32]}-{kind}-{rank.number}-of-{rank.ranks}{groups}{layers}"


class _Job:
    """Packs a list of matrices, in memory or into a file."""

    def __init__(
        self, stacks: Sequence[Stack], kinds: Mapping[str, str], dtype: torch.dtype, threads: int, packer: Packer
    ) -> None:
        """`kinds` are those of the stacks, by name."""
        self._stacks = stacks
        self._kinds = kinds
        self._dtype = dtype
        self._threads = threads
        self.packer = packer
        self._foreseen = all(foreseen(stack, kinds[stack.name]) for stack in stacks)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices; the stored size when the packed size is not known in advance."""
        if self._foreseen:
            return plan(self._stacks, self._kinds, 0)[1]
        return sum(part.nbytes for stack in self._stacks for part in stack.parts)

    def in_memory(self) -> dict[str, Packed]:
        if self._foreseen:
            return self._placed_in_memory(self._stacks)
        return {stack.name: self._whole(stack) for stack in self._stacks}

    def to_file(self, file: int) -> None:
        def write(at: int, piece: Tensor) -> None:
            write_bytes(file, at, piece)

        records: dict[str, Record] = {}
        if self._foreseen:
            records, end = plan(self._stacks, self._kinds, PAGE)
            self._place(self._stacks, records, write)
        else:
            end = PAGE
            for stack in self._stacks:  # one matrix at a time in memory
                records[stack.name], tensors, end = record_of(self._whole(stack), end)
                for place, tensor in tensors:
                    write(place.at, tensor)
        finish(file, records, end, lambda content: self.packer.checksums(content, self._threads))

    def _placed_in_memory(self, stacks: Sequence[Stack]) -> dict[str, Packed]:
        records, end = plan(stacks, self._kinds, 0)
        content = anonymous(end)

        def write(at: int, piece: Tensor) -> None:
            content[at : at + piece.nbytes].copy_(piece.reshape(-1).view(torch.uint8))

        self._place(stacks, records, write)
        return {name: packed_of(record, content) for name, record in records.items()}

    def _place(self, stacks: Sequence[Stack], records: Mapping[str, Record], write: Write) -> None:
        """Packs matrices, and writes them where `plan` has planned them."""
        slices = [stack for stack in stacks if sliced(stack, self._kinds[stack.name])]
        pack_slices(self.packer, slices, records, threads=self._threads, write=write)
        for stack in stacks:
            if sliced(stack, self._kinds[stack.name]):
                continue
            packed, record = self._whole(stack), records[stack.name]
            for name, place in record.items():
                if isinstance(place, Place):
                    write(place.at, getattr(packed, name))

    def _whole(self, stack: Stack) -> Packed:
        name, kind = stack.name, self._kinds[stack.name]
        if kind == "lossless" and sliced(stack, "bfloat16"):
            plain = _Job([stack], {name: "bfloat16"}, self._dtype, self._threads, self.packer)
            return compressed(library(), plain.in_memory()[name])
        return pack(stack.joined(self._read), kind)

    def _read(self, part: TensorInfo) -> Tensor:
        return numbers(part, read_tensor).to(self._dtype)


def _nbytes(packed: Packed) -> int:
    _, tensors, _ = record_of(packed, 0)
    return sum(tensor.nbytes for _, tensor in tensors)
