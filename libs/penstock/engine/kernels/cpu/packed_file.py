"""The file format of packed matrices. A file is made once, and every process that computes with the matrices maps it.

The first PAGE bytes hold the magic, the length and sha256 of the directory, and, at byte _BOOT_AT, the boot in which
the data were last checked. Then come the tensors, each at a multiple of ALIGNED bytes. The directory is at the end. It
is JSON and has the checksums of the data and, for each matrix, the fields of its Packed, with a tensor as dtype, shape
and place.

The first page is written last, but nothing waits for the disk. If a power cut left the file incomplete, the check of
the data finds that; they are checked once after each start of the machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.memory import populated
from penstock.engine.kernels.cpu.packed import Packed

FORMAT = 2
"""The version of this format, of the order of `pack` and of what is packed; files with another version are not read."""
PAGE = 4096
ALIGNED = 128
_MAGIC = b"penstock packed %04d" % FORMAT
_DIGEST = hashlib.sha256().digest_size
_BOOT_AT, _BOOT_BYTES = 1024, 64
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Checksums = Callable[[Tensor], bytes]
"""Computes the checksums of uint8 [n]; n is a multiple of ALIGNED."""


class Unusable(Exception):
    """The file is torn, damaged or of another format; the message says which."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor in the file, or in any other run of bytes."""

    dtype: str
    shape: tuple[int, ...]
    at: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def end(self) -> int:
        """Where the next tensor may begin."""
        return -(-(self.at + self.nbytes) // ALIGNED) * ALIGNED

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def tensor(self, content: Tensor) -> Tensor:
        """The tensor at this place: a view of `content`, uint8."""
        return content[self.at : self.at + self.nbytes].view(self.torch_dtype).view(self.shape)


Record = dict[str, Place | int | str | None]
"""The fields of a Packed."""


def packed_of(record: Record, content: Tensor) -> Packed:
    """The matrix that `record` describes; `content` is uint8, from the file's first byte on."""
    fields: dict[str, Any] = {
        name: value.tensor(content) if isinstance(value, Place) else value for name, value in record.items()
    }
    return Packed(**fields)


def record_of(packed: Packed, at: int) -> tuple[Record, list[tuple[Place, Tensor]], int]:
    """For a matrix that goes to byte `at`: (its record, its tensors with their places, where they end)."""
    record: Record = {}
    tensors = []
    for field in dataclasses.fields(packed):
        value = getattr(packed, field.name)
        if isinstance(value, Tensor):
            place = Place(str(value.dtype).removeprefix("torch."), tuple(value.shape), at)
            tensors.append((place, value))
            value, at = place, place.end
        record[field.name] = value
    return record, tensors, at


def write_bytes(file: int, at: int, content: Tensor) -> None:
    """Writes all of `content`, which is contiguous, to byte `at` of the file."""
    left = content.reshape(-1).view(torch.uint8).numpy().data
    while left:
        count = os.pwrite(file, left, at)
        left, at = left[count:], at + count


def finish(file: int, records: Mapping[str, Record], end: int, checksums: Checksums) -> None:
    """Completes the file, whose data end at byte `end`."""
    os.ftruncate(file, end)
    sums = checksums(populated(file, end)[PAGE:]).hex() if end > PAGE else ""
    matrices = {name: {key: _plain(value) for key, value in record.items()} for name, record in records.items()}
    directory = json.dumps({"end": end, "checksums": sums, "matrices": matrices}).encode()
    write_bytes(file, end, torch.frombuffer(bytearray(directory), dtype=torch.uint8))
    first = _MAGIC + len(directory).to_bytes(8, "little") + hashlib.sha256(directory).digest()
    os.pwrite(file, first.ljust(_BOOT_AT, b"\0") + _boot().ljust(PAGE - _BOOT_AT, b"\0"), 0)


def checked(file: int) -> None:
    """Notes in the file, which is open for writing, that its data are sound; this holds until the machine starts
    again."""
    os.pwrite(file, _boot(), _BOOT_AT)


def read(file: int, checksums: Checksums) -> tuple[dict[str, Packed], int, bool]:
    """Reads a file: (the matrices, whose tensors are views of the mapped file; its bytes of data; whether they had to
    be checked).

    Raises Unusable.
    """
    size = os.fstat(file).st_size
    first = os.pread(file, PAGE, 0)
    if len(first) < PAGE or not first.startswith(_MAGIC):
        raise Unusable("it does not begin like a whole file of this format")
    length = int.from_bytes(first[len(_MAGIC) : len(_MAGIC) + 8], "little")
    digest = first[len(_MAGIC) + 8 : len(_MAGIC) + 8 + _DIGEST]
    if length > size - PAGE:
        raise Unusable(f"its {size} bytes cannot hold a directory of {length}")
    raw = os.pread(file, length, size - length)
    if hashlib.sha256(raw).digest() != digest:
        raise Unusable("its directory has another checksum")
    directory = json.loads(raw)
    end = directory["end"]
    if end + length != size:
        raise Unusable(f"it has {size} bytes and should have {end + length}")
    content = populated(file, end)
    unchecked = first[_BOOT_AT : _BOOT_AT + _BOOT_BYTES] != _boot()
    if unchecked and checksums(content[PAGE:]).hex() != directory["checksums"]:
        raise Unusable("its data have another checksum")
    try:
        matrices = {
            name: packed_of({key: _value(value) for key, value in record.items()}, content)
            for name, record in directory["matrices"].items()
        }
    except TypeError as error:
        raise Unusable(f"its matrices have other fields: {error}") from None
    return matrices, end, unchecked


def _boot() -> bytes:
    """The name of this boot of the machine; if the system has none, a name that never comes again."""
    try:
        name = _BOOT.read_bytes().strip()
    except OSError:
        name = os.urandom(16).hex().encode()
    return name[:_BOOT_BYTES].ljust(_BOOT_BYTES, b"\0")


def _plain(value: Place | int | str | None) -> Any:
    return dataclasses.asdict(value) if isinstance(value, Place) else value


def _value(value: Any) -> Place | int | str | None:
    if isinstance(value, dict):
        return Place(value["dtype"], tuple(value["shape"]), value["at"])
    assert value is None or isinstance(value, (int, str))
    return value
