"""Sums over the processes of one host that compute a model together, in memory that they share: see meeting.h."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_char

import torch
from torch import Tensor

from penstock.engine.errors import RankLost
from penstock.engine.kernels.cpu.build import library
from penstock.engine.kernels.cpu.layout import RanksArgs

_LINE = 64
_FLOAT = 4
_ALIGN = 16


class SharedGroup:
    """A RankGroup of ranks with common memory. Sums are made in the order of the ranks, so all have the same."""

    def __init__(self, memory: memoryview, rank: int, columns: Sequence[int], room: int) -> None:
        """`memory` is of `memory_bytes`, shared and zero at first, `columns` are those of each rank's logits. Raises
        NotBuilt."""
        self._library = library()
        self._columns, self._room = columns, room
        self._memory = memory
        ranks = len(columns)
        self.args = RanksArgs(addressof(c_char.from_buffer(memory)), room, 0, rank, ranks)
        """The library's arguments."""
        floats = torch.frombuffer(memory, dtype=torch.float32)
        self._places = floats[(1 + ranks) * _LINE // _FLOAT :].view(2, ranks, room)

    @staticmethod
    def room(floats: int) -> int:
        """Floats that each rank brings at most at a time, as a place has them."""
        return -(-floats // _ALIGN) * _ALIGN

    @staticmethod
    def memory_bytes(ranks: int, room: int) -> int:
        """Of the memory that they share."""
        return (1 + ranks) * _LINE + 2 * ranks * room * _FLOAT

    def add(self, own: Tensor) -> Tensor:
        """See RankGroup."""
        summed = own.float().contiguous()
        if not self._library.penstock_add(byref(self.args), summed.data_ptr(), summed.numel()):
            raise _lost()
        return summed.to(own.dtype)

    def gather(self, own: Tensor) -> Tensor | None:
        """See RankGroup."""
        rank, widest = self.args.rank, max(self._columns)
        found = own.new_empty(len(own), sum(self._columns)) if rank == 0 else None
        step = max(1, self._room // widest)
        assert widest <= self._room
        for first in range(0, len(own), step):
            some = own[first : first + step]
            turn = (self.args.turn + 1) % 2
            self._places[turn, rank, : some.numel()].view(some.shape).copy_(some)
            if not self._library.penstock_meet(byref(self.args)):
                raise _lost()
            if found is None:
                continue
            begin = 0
            for other, count in enumerate(self._columns):
                room = self._places[turn, other, : len(some) * count].view(len(some), count)
                found[first : first + step, begin : begin + count] = room
                begin += count
        return found

    def wait(self) -> None:
        """See RankGroup: it is done already."""

    def close(self) -> None:
        """Nobody waits any more. Callable from any thread."""
        self._memory[0] = 1


def _lost() -> RankLost:
    return RankLost("a process that computes a part of the model has ended, or does not answer")
