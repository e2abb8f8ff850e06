"""Blocks between host memory and the device, each checked against its checksum. Blocks the thread that calls.

A block keeps the checksum of its writer in every tier. After a copy up, the device's bytes are
read back and checked, once, before a client can find the block there; so a block on the device was right when it
arrived, however it got there. Whenever bytes come down they are checked in host memory, before a client can find them
there. A read on the device itself is not checked: that would cost the copy that it saves, so between arrival
and departure the device's own error correction is relied on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.kv.bytes.checksum import checksum
from penstock.kv.device.memory import DeviceArena


class Outcome(Enum):
    """The outcome of copying one block."""

    GOOD = 1
    BAD_SOURCE = 2
    """The bytes that were to be copied are not those of the block."""
    BAD_COPY = 3
    """The bytes changed on the way. The source is right."""


@dataclass(frozen=True, slots=True)
class Move:
    """A block and its two places."""

    offset: int
    """In the device arena."""
    host: memoryview
    checksum: bytes


class Copier:
    """At most `batch` blocks in one call. `up` is called from one thread at a time, `down` from any."""

    def __init__(self, arena: DeviceArena, block_bytes: int, batch: int) -> None:
        self.batch = batch
        self._arena = arena
        self._block_bytes = block_bytes
        self._read_back = arena.pinned(batch * block_bytes)

    def up(self, moves: Sequence[Move]) -> list[Outcome]:
        """Raises DeviceFault when nothing is known of any of them; nothing writes to their slots any more then."""
        self._arena.upload([(move.offset, move.host) for move in moves]).wait()
        copies = [self._read_back[at * self._block_bytes :][: self._block_bytes] for at in range(len(moves))]
        self._arena.download([(move.offset, copy) for move, copy in zip(moves, copies, strict=True)]).wait()
        return [_arrived(move, copy) for move, copy in zip(moves, copies, strict=True)]

    def down(self, moves: Sequence[Move]) -> list[Outcome]:
        """As `up`. A wrong block is a BAD_SOURCE only when it is wrong once more."""
        self._download(moves)
        bad = [move for move in moves if checksum(move.host) != move.checksum]
        if not bad:
            return [Outcome.GOOD] * len(moves)
        self._download(bad)
        wrong = {move.offset for move in bad if checksum(move.host) != move.checksum}
        return [Outcome.BAD_SOURCE if move.offset in wrong else Outcome.GOOD for move in moves]

    def _download(self, moves: Sequence[Move]) -> None:
        self._arena.download([(move.offset, move.host) for move in moves]).wait()


def _arrived(move: Move, copy: memoryview) -> Outcome:
    if checksum(copy) == move.checksum:
        return Outcome.GOOD
    return Outcome.BAD_COPY if checksum(move.host) == move.checksum else Outcome.BAD_SOURCE
