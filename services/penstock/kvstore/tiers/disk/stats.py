"""The counters of the disk tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.kvstore.tiers.disk.format import Drop


@dataclass(slots=True)
class Traffic:
    """The blocks and bytes that went in and out, over all spaces of a tier."""

    blocks_read: int = 0
    bytes_read: int = 0
    blocks_written: int = 0
    bytes_written: int = 0
    refused: int = 0
    """Blocks not written because there was no place that could be freed."""
    prefetched: int = 0
    """Bringings for sessions that were expected."""
    dropped: Counter[Drop] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class NvmeStats:
    """Counted by the disk itself; metrics, tests and the wire read the same numbers.

    What only an open space has is 0 while none is open.
    """

    slots: int = 0
    blocks: int = 0
    used_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    evictions: int = 0
    torn: int = 0
    """Slots without a whole header, or without a whole file."""
    corrupt: int = 0
    stale: int = 0
    foreign: int = 0
    unreadable: int = 0
    read_failures: int = 0
    """How often the tier stopped reading for a while."""
    write_failures: int = 0
    reading: int = 0
    """1: reads are tried, 0: the disk is left alone for now."""
    writing: int = 0
    direct: int = 0
    """1: the page cache is left out."""
    written_today: int = 0
    """Bytes, of the day's allowance."""
    refused: int = 0
    """Blocks not written because there was no place that could be freed."""
    pending: int = 0
    """Blocks that are to be written."""
    waiting: int = 0
    """Blocks that have not earned the disk yet."""
    prefetched: int = 0
    """Bringings for sessions that were expected."""
