"""What ranks compute together: sums over all, and logits of all tokens out of those that each has."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.checkpoint import ModelConfig
from penstock.engine.config import EngineConfig
from penstock.engine.errors import RankLost
from penstock.engine.kernels.cpu.meeting import SharedGroup
from penstock.kv.bytes.arena import Layout

TIMEOUT_S = 60.0
"""Seconds that a rank waits for the others in a step: they all compute as much."""


class RankGroup(Protocol):
    """The ranks of one engine. All call the same functions in the same order. Each raises RankLost when a rank has
    ended, or does not answer in time."""

    def add(self, own: Tensor) -> Tensor:
        """The sum over all ranks, the same numbers on each; may be in the memory of `own`."""
        ...

    def gather(self, own: Tensor) -> Tensor | None:
        """[N, own columns] of each rank, side by side, on rank 0; None on the others."""
        ...

    def close(self) -> None:
        """Ends what waits for other ranks. Callable from any thread."""
        ...


class TorchGroup:
    """By torch.distributed's gloo over the loopback device, where there are no kernels. The group is this object's, not
    the process's."""

    def __init__(self, meeting: str, rank: int, columns: list[int]) -> None:
        """`meeting` is a file that all ranks can reach and nobody else, `columns` are those of each rank's logits.
        Returns when all ranks are there. Raises RankLost."""
        import torch.distributed as dist  # most workers never need it

        self._dist: Any = dist  # much of it has no types
        self._rank, self._columns = rank, columns
        timeout = timedelta(seconds=TIMEOUT_S)
        ranks = len(columns)
        try:
            store = self._dist.FileStore(meeting, ranks)
            store.set_timeout(timeout)
            self._group = self._gloo(store, rank, ranks, timeout)
        except RuntimeError as error:
            raise RankLost(f"the ranks of the model do not find each other: {error}") from error

    def add(self, own: Tensor) -> Tensor:
        if not own.numel():
            return own
        own = own.contiguous()
        self._done(self._group.allreduce([own]))
        return own

    def gather(self, own: Tensor) -> Tensor | None:
        first = self._rank == 0
        if not len(own):
            return own.new_empty(0, sum(self._columns)) if first else None
        widest = max(self._columns)
        if own.shape[1] < widest:
            own = torch.nn.functional.pad(own, (0, widest - own.shape[1]))
        rooms = [torch.empty_like(own) for _ in self._columns] if first else []
        options = self._dist.GatherOptions()
        options.rootRank = 0
        self._done(self._group.gather([rooms] if first else [], [own.contiguous()], options))
        if not first:
            return None
        return torch.cat([room[:, :count] for room, count in zip(rooms, self._columns, strict=True)], 1)

    def close(self) -> None:
        self._group.abort()

    def _done(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RankLost(f"a rank of the model does not answer: {error}") from error

    def _gloo(self, store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
        kind = self._dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(interface="lo")]
        options._timeout = timeout
        return kind(store, rank, ranks, options)


def shared_room(model: ModelConfig, config: EngineConfig) -> int:
    """Floats that a rank brings at most: what it adds to all rows of a step, or the logits of one."""
    return SharedGroup.room(max(config.max_batch_tokens * model.hidden_size, model.vocab_size))


def shared_layout(ranks: int, room: int) -> Layout:
    """Of an arena for a SharedGroup: all is in one slot."""
    return Layout.gapless(1, SharedGroup.memory_bytes(ranks, room))
