"""What ranks compute together: sums over all, and logits of all tokens out of those that each has."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.checkpoint import ModelConfig
from penstock.engine.config import EngineConfig
from penstock.engine.errors import RankLost
from penstock.engine.kernels.cpu.meeting import SharedGroup
from penstock.engine.ranks.followers import LOAD_S
from penstock.kv.bytes.arena import Layout

TIMEOUT_S = 60.0
"""Seconds that a rank waits for the others in a step: they all compute as much."""
_LAST_S = 2 * TIMEOUT_S
"""Seconds after which NCCL ends a process in which it waits for others, should this one not have given up itself."""
_LOOK_S = 50e-6
"""Between two looks whether a device is done."""
_CPU = torch.device("cpu")
_log = logging.getLogger(__name__)


class RankGroup(Protocol):
    """The ranks of one engine. All call the same functions in the same order. Each raises RankLost when a rank has
    ended, or does not answer in time."""

    def add(self, own: Tensor) -> Tensor:
        """The sum over all ranks, the same numbers on each; may be in the memory of `own`."""
        ...

    def gather(self, own: Tensor) -> Tensor | None:
        """[N, own columns] of each rank, side by side, on rank 0; None on the others."""
        ...

    def wait(self) -> None:
        """Returns when all that was called before is done: a device may compute it while the host goes on."""
        ...

    def close(self) -> None:
        """Ends what waits for other ranks. Callable from any thread."""
        ...


class TorchGroup:
    """By torch.distributed's gloo over the loopback device, where there are no kernels. What is on other devices goes
    by way of host memory. The group is this object's, not the process's."""

    def __init__(self, meeting: str, rank: int, columns: list[int]) -> None:
        """`meeting` is a file that all ranks can reach and nobody else, `columns` are those of each rank's logits.
        Returns when all ranks are there, which load for as long as they need. Raises RankLost."""
        import torch.distributed as dist  # most workers never need it

        self._dist: Any = dist  # much of it has no types
        self._rank, self._columns = rank, columns
        self._closed = False
        try:
            store = self._dist.FileStore(meeting, len(columns))
            store.set_timeout(timedelta(seconds=TIMEOUT_S))
            store.set(f"here/{rank}", "")
            store.wait([f"here/{other}" for other in range(len(columns))], timedelta(seconds=LOAD_S))
            self._group = self._open(store, rank, len(columns))
        except RuntimeError as error:
            raise RankLost(f"the ranks of the model do not find each other: {error}") from error

    def add(self, own: Tensor) -> Tensor:
        if not own.numel():
            return own
        given = self._brought(own).contiguous()
        self._call(lambda: self._group.allreduce([given]))
        return given.to(own.device)

    def gather(self, own: Tensor) -> Tensor | None:
        first = self._rank == 0
        if not len(own):
            return own.new_empty(0, sum(self._columns)) if first else None
        widest, given = max(self._columns), self._brought(own)
        if given.shape[1] < widest:
            given = torch.nn.functional.pad(given, (0, widest - given.shape[1]))
        rooms = [torch.empty_like(given) for _ in self._columns] if first else []
        options = self._dist.GatherOptions()
        options.rootRank = 0
        self._call(lambda: self._group.gather([rooms] if first else [], [given.contiguous()], options))
        if not first:
            return None
        found = torch.cat([room[:, :count] for room, count in zip(rooms, self._columns, strict=True)], 1)
        return found.to(own.device)

    def wait(self) -> None:
        """It is done already."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._abort()

    def _brought(self, own: Tensor) -> Tensor:
        """To where the group's calls take it."""
        return own.to(_CPU)

    def _abort(self) -> None:
        self._group.abort()

    def _call(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise RankLost(f"a rank of the model does not answer: {error}") from error

    def _open(self, store: Any, rank: int, ranks: int) -> Any:
        kind = self._dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(interface="lo")]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        return kind(store, rank, ranks, options)


class DeviceGroup(TorchGroup):
    """By torch.distributed's NCCL, of ranks that have a CUDA device each. Calls return before they are done; what the
    device computes afterwards waits for them there.

    A device that waits for a rank which has ended would wait for ever, and the host for it. So the host looks for at
    most TIMEOUT_S whether the device is done, and `close` ends what it waits for: then nothing that was computed is
    right, and everything raises RankLost. Where the host waits for the device in the middle of a step, for a router or
    an adapter of experts, it hears of a rank that has ended; should one hang there, NCCL ends this process after a
    while. This is written against torch's documented interface; it has not run on a GPU yet.
    """

    def __init__(self, meeting: str, rank: int, columns: list[int], place: torch.device) -> None:
        """As TorchGroup; `place` is this rank's device."""
        self._place = place
        super().__init__(meeting, rank, columns)
        failed: list[Exception] = []

        def find() -> None:
            try:
                self.add(torch.ones(1, device=place))
            except Exception as error:
                failed.append(error)

        finding = Thread(target=find, name="find", daemon=True)  # the first call waits for all, however long that is
        finding.start()
        finding.join(TIMEOUT_S)
        if failed or finding.is_alive():
            reason = failed[0] if failed else f"not all are there after {TIMEOUT_S:.0f} seconds"
            raise RankLost(f"the devices of the ranks do not find each other: {reason}")
        self.wait()

    def wait(self) -> None:
        over = self._over()
        until = time.monotonic() + TIMEOUT_S
        while not (self._closed or over()):
            if time.monotonic() > until:
                self.close()
            time.sleep(_LOOK_S)
        if self._closed:
            raise RankLost("a rank of the model has ended, or does not answer")

    def _over(self) -> Callable[[], bool]:
        """Says whether the device has done what it was told so far."""
        from penstock.engine.kernels.cuda.streams import recorded  # imported only for CUDA devices

        return recorded(torch.cuda.current_stream(self._place)).query

    def _brought(self, own: Tensor) -> Tensor:
        return own

    def _abort(self) -> None:
        """In a thread of its own, which the process waits for when it ends: it may take a while."""
        Thread(target=self._group.abort, name="abort").start()

    def _call(self, begin: Callable[[], Any]) -> None:
        if self._closed:
            raise RankLost("a rank of the model has ended")
        super()._call(begin)

    def _open(self, store: Any, rank: int, ranks: int) -> Any:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all are on this host
        kind = self._dist.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = timedelta(seconds=_LAST_S)
        return kind(store, rank, ranks, options)


def open_group(meeting: str, rank: int, columns: list[int], config: EngineConfig) -> RankGroup:
    """The group of a stage's ranks, of which `config` says where this one computes. Returns when all are there. Raises
    RankLost."""
    import torch.distributed as dist  # most workers never need it

    if config.device != "cpu" and not config.one_device:
        if dist.is_nccl_available():
            return DeviceGroup(meeting, rank, columns, torch.device(config.device))
        _log.warning("torch %s has no NCCL: what ranks add goes by way of host memory", torch.__version__)
    return TorchGroup(meeting, rank, columns)


def shared_room(model: ModelConfig, config: EngineConfig) -> int:
    """Floats that a rank brings at most: what it adds to all rows of a step, or the logits of one."""
    return SharedGroup.room(max(config.max_batch_tokens * model.hidden_size, model.vocab_size))


def shared_layout(ranks: int, room: int) -> Layout:
    """Of an arena for a SharedGroup: all is in one slot."""
    return Layout.gapless(1, SharedGroup.memory_bytes(ranks, room))
