"""Rank 0's side: the other processes, and the steps that they are told."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Protocol

import msgspec
from torch import Tensor

from penstock.checkpoint import (
    AdapterCheckpoint,
    Checkpoint,
    CheckpointError,
    ModelConfig,
    Rank,
    adapter_of_rank,
    part_of,
)
from penstock.checkpoint.split import heads_of_rank, share
from penstock.engine.config import EngineConfig
from penstock.engine.errors import RankLost
from penstock.engine.kernels.cpu.build import NotBuilt
from penstock.engine.kernels.cpu.meeting import SharedGroup
from penstock.engine.ranks.group import RankGroup, TorchGroup, shared_layout, shared_room
from penstock.engine.ranks.messages import Setup, SharedMemory, StepTeller, receive, send, settings_of
from penstock.engine.ranks.window import PageWindow
from penstock.engine.step.batch import Rows
from penstock.engine.step.memory import PageMemory
from penstock.kv.bytes.arena import Arena

_FOLLOWER = "penstock.engine.forward.following"
_LOAD_S = 1800.0
"""Seconds that a rank may take to load its part."""
_STEP_S = 90.0
"""Seconds for which rank 0, which has computed its part of a step, waits for another one to be done with it."""
_END_S = 5.0
_log = logging.getLogger(__name__)


class Follows(Protocol):
    """What follows: a RankProcess, or a stand-in in tests."""

    pid: int
    watched: int

    def kill(self) -> None: ...

    def end(self) -> None: ...


Launch = Callable[[socket.socket], Follows]
"""Starts what follows, which reads this socket."""


class Lead:
    """The other ranks of an engine. Belongs to the thread that computes steps, but for `watched`, `abandon` and what is
    about adapters."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        memory: PageMemory,
        fingerprint: str,
        launch: Launch | None = None,
    ) -> None:
        """Starts the processes, which load their parts meanwhile. `memory` is shared."""
        assert memory.arena is not None
        whole, ranks = checkpoint.config, config.tp
        self.vocab_size = whole.vocab_size
        self.memory = memory
        self.window = PageWindow(memory, heads_of_rank(whole.kv.heads, ranks, 0))
        self._rank = Rank(0, ranks, config.ep)
        self.checkpoint = part_of(checkpoint, self._rank, fingerprint)
        """What rank 0 has of the model."""
        self._columns = [len(share(whole.vocab_size, ranks, rank)) for rank in range(ranks)]
        self._whole = checkpoint
        self._teller = StepTeller()
        self._turn = Lock()
        """Whoever has it talks with the others, until they have answered."""
        self._forgotten: deque[str] = deque()
        """Adapters that the others still keep."""
        self._sums: Arena | None = None
        self.shared = self._share(whole, config)
        """Where ranks add what they compute; None: by torch.distributed."""
        self._group: RankGroup | None = self.shared
        self._lost: RankLost | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))
        pages = SharedMemory.of(memory.arena)
        sums = None if self._sums is None else SharedMemory.of(self._sums)
        self._followers: list[_Follower] = []
        try:
            for rank in range(1, ranks):
                setup = Setup(rank, ranks, settings_of(config), fingerprint, pages, sums, self._meeting)
                self._followers.append(_Follower(setup, launch or RankProcess))
        except BaseException:
            self.close()
            raise

    def _share(self, model: ModelConfig, config: EngineConfig) -> SharedGroup | None:
        if not config.kernels:
            return None
        room = shared_room(model, config)
        layout = shared_layout(config.tp, room)
        try:
            arena = Arena(layout.offset(1))
            arena.format(layout)
            self._sums = arena
            return SharedGroup(arena.slots(), 0, self._columns, room)
        except NotBuilt:
            return None

    @property
    def _meeting(self) -> str:
        return str(self._directory / "meeting")

    @property
    def watched(self) -> Sequence[int]:
        """Files that can be read as soon as one of the processes has ended."""
        return [follower.process.watched for follower in self._followers]

    @property
    def pids(self) -> Sequence[int]:
        """Of the other ranks."""
        return [follower.process.pid for follower in self._followers]

    def meet(self) -> None:
        """Returns when all ranks have loaded and can compute. Raises RankLost."""
        for follower in self._followers:
            follower.done()
            follower.patience(_STEP_S)
        if self._group is None:
            self._group = TorchGroup(self._meeting, 0, self._columns)

    def add(self, own: Tensor) -> Tensor:
        """See RankGroup."""
        assert self._group is not None
        return self._group.add(own)

    @contextmanager
    def step(self, order: Sequence[Rows], compiled: bool) -> Iterator[Callable[[Tensor], Tensor]]:
        """Has the others compute a step too; gives what makes logits of all tokens out of this rank's. When the block
        ends, all have. Raises RankLost, from the first failure on always."""
        group = self._group
        assert group is not None

        def gather(own: Tensor) -> Tensor:
            found = group.gather(own)
            assert found is not None
            return found

        with self._talk():
            self._tell(self._teller.tell(order, compiled, self._forget()))
            yield gather
            for follower in self._followers:
                follower.done()

    def adapter(self, found: AdapterCheckpoint) -> AdapterCheckpoint:
        """Has the others load their parts of an adapter, for which steps wait; what rank 0 has of it. Callable from any
        thread. Raises CheckpointError, and RankLost."""
        with self._talk():
            self._tell(self._teller.adapter(found.path, found.fingerprint, self._forget()))
            reasons = [follower.answer() for follower in self._followers]
        for reason in filter(None, reasons):
            raise CheckpointError(found.file, reason)
        return adapter_of_rank(found, self._whole, self._rank)

    def forget_adapter(self, fingerprint: str) -> None:
        """The others let go of an adapter with the next message. Callable from any thread."""
        self._forgotten.append(fingerprint)

    @contextmanager
    def _talk(self) -> Iterator[None]:
        """The others listen to nobody else. Raises RankLost, from the first failure on always."""
        with self._turn:
            if self._lost is not None:
                raise self._lost
            try:
                yield
            except Exception as error:  # where the others are now is not known
                self._lost = error if isinstance(error, RankLost) else RankLost(f"a step failed in some ranks: {error}")
                self.abandon()
                raise self._lost from error

    def _tell(self, message: bytes) -> None:
        for follower in self._followers:
            follower.tell(message)

    def _forget(self) -> list[str]:
        return [self._forgotten.popleft() for _ in range(len(self._forgotten))]

    def abandon(self) -> None:
        """Ends the other processes: whoever waits for one of them hears of it. Callable from any thread."""
        if self.shared is not None:
            self.shared.close()
        for follower in self._followers:
            follower.process.kill()

    def close(self) -> None:
        """Ends the other processes."""
        for follower in self._followers:
            follower.leave()
        for follower in self._followers:
            follower.end()
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._sums is not None:
            self._sums.close()
            self._sums = None
        shutil.rmtree(self._directory, ignore_errors=True)


class RankProcess:
    """A process that follows. Made with the socket that it reads; whoever made it closes that."""

    def __init__(self, theirs: socket.socket) -> None:
        command = [sys.executable, "-P", "-m", _FOLLOWER]  # without the working directory, which -m else puts first
        self._popen = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        self.pid = self._popen.pid
        self.watched = os.pidfd_open(self.pid)
        """A file that can be read as soon as the process has ended."""

    def kill(self) -> None:
        """Ends it at once. Callable from any thread."""
        self._popen.kill()

    def end(self) -> None:
        """Waits until it has ended: its socket is closed."""
        try:
            self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        os.close(self.watched)


class _Follower:
    """A rank, and the socket to it."""

    def __init__(self, setup: Setup, launch: Launch) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_LOAD_S)
        with theirs:
            self.process = launch(theirs)
        with suppress(OSError):  # one that has ended at once is noticed when it should have loaded
            send(self._socket, msgspec.msgpack.encode(setup))

    def patience(self, seconds: float) -> None:
        """How long it may take from now on."""
        self._socket.settimeout(seconds)

    def tell(self, message: bytes) -> None:
        """Raises RankLost."""
        try:
            send(self._socket, message)
        except OSError as error:
            raise _ended(error) from error

    def done(self) -> None:
        """Waits until it has loaded, or computed what it was told. Raises RankLost, also when it could not."""
        if answer := self.answer():
            raise RankLost(answer)

    def answer(self) -> str:
        """Waits until it has done what it was told: why it could not, or nothing. Raises RankLost."""
        try:
            return receive(self._socket).decode()
        except (EOFError, OSError) as error:
            raise _ended(error) from error

    def leave(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self.process.end()
        self._socket.close()


def _ended(error: Exception) -> RankLost:
    return RankLost(f"a process that computes a part of the model has ended: {error}")
