"""Finds the blocks in the slabs when a store starts."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import Progress

from penstock.kvstore.table.blocks import Block
from penstock.kvstore.tiers.disk.format import Drop, Header
from penstock.kvstore.tiers.disk.slabs import Slabs

_AT_ONCE = 8
_LONG_S = 2.0


class Advance(Protocol):
    """Is told how far a long piece of work has come."""

    def __call__(self, done: int, total: int) -> None: ...


@dataclass(slots=True)
class ScanResult:
    """The blocks of a directory in the order of their writing, and the number of dropped ones by reason."""

    blocks: list[Block] = field(default_factory=list)
    dropped: Counter[Drop] = field(default_factory=Counter)
    sequence: int = 0
    """The highest that was met."""


@dataclass(slots=True)
class _Slab:
    """The content of one file."""

    headers: list[tuple[int, Header]] = field(default_factory=list)
    dropped: Counter[Drop] = field(default_factory=Counter)


def scan(slabs: Slabs, slots: int, advance: Advance) -> ScanResult:
    """Reads the header of every slot below `slots`; blocks are verified when they are read. Opens the slabs.

    A slab that can't be opened or is not of the declared size loses the missing blocks. Blocking.
    """
    found, newest = ScanResult(), dict[bytes, Block]()
    numbers = [number for number in slabs.existing() if number * slabs.shape.slab_slots < slots]
    with ThreadPoolExecutor(_AT_ONCE, "penstock-nvme-scan") as threads:
        for done, slab in enumerate(threads.map(lambda number: _scan_slab(slabs, number, slots), numbers)):
            advance(done + 1, len(numbers))
            found.dropped += slab.dropped
            for slot, header in slab.headers:
                _take(slot, header, newest, found)
    found.blocks = sorted(newest.values(), key=lambda block: block.epoch)
    return found


def _scan_slab(slabs: Slabs, number: int, slots: int) -> _Slab:
    found, shape = _Slab(), slabs.shape
    try:
        size = slabs.open(number)
    except OSError:
        found.dropped[Drop.TORN] += 1
        return found
    whole = min(size // shape.slot_bytes, shape.slab_slots)
    if size:  # else it was made, and nothing was set aside for it yet
        found.dropped[Drop.TORN] += shape.slab_slots - whole
    first = number * shape.slab_slots
    for slot in range(first, min(slots, first + whole)):
        try:
            header = slabs.header(slot)
        except OSError:
            header = Drop.UNREADABLE
        if isinstance(header, Drop):
            found.dropped[header] += 1
        elif header is not None:
            found.headers.append((slot, header))
    return found


def _take(slot: int, header: Header, newest: dict[bytes, Block], found: ScanResult) -> None:
    found.sequence = max(found.sequence, header.sequence)
    other = newest.get(header.key)
    if other is not None:
        found.dropped[Drop.STALE] += 1
        if other.epoch > header.sequence:
            return
    newest[header.key] = block_of(header, slot)


def block_of(header: Header, slot: int) -> Block:
    """A stored block as a table keeps it: its epoch is the sequence number of its writing.

    Only `retained_until` is what the header says, in seconds since 1970.
    """
    return Block(
        header.key,
        header.parent,
        header.first_token,
        slot,
        header.sequence,
        "disk",
        checksum=header.checksum,
        namespace=header.namespace if any(header.namespace) else b"",
        seconds=header.seconds,
        uses=header.uses,
        retained_until=header.retained_until,
    )


@contextmanager
def progress_bar(what: str) -> Iterator[Advance]:
    """A bar on stderr for work that takes long, when a person may look at it."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=None, visible=False)
        begin = time.monotonic()

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=time.monotonic() - begin > _LONG_S)

        yield advance
