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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Protocol

import msgspec
from torch import Tensor

from penstock.checkpoint import (
    AdapterCheckpoint,
    Checkpoint,
    CheckpointError,
    ExpertCopies,
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
from penstock.engine.pictures.shown import ShownRows
from penstock.engine.ranks.group import RankGroup, TorchGroup, shared_layout, shared_room
from penstock.engine.ranks.messages import Setup, SharedMemory, StepTeller, receive, send, settings_of
from penstock.engine.ranks.place import RankStep
from penstock.engine.ranks.stages import PassingRoom, Pipes, pieces_of, pipes_between
from penstock.engine.ranks.window import PageWindow
from penstock.engine.step.batch import Rows
from penstock.engine.step.memory import PageMemory
from penstock.kv.bytes.arena import Arena, Layout

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


class ComputesPieces(Protocol):
    """What computes the first stage; a Runner."""

    def takes(self, runs: Sequence[Rows]) -> bool:
        """Whether the kernels compute these rows in one call."""
        ...

    def rows_shown(self, order: Sequence[Rows]) -> ShownRows | None:
        """What stands in the place of their tokens' embeddings."""
        ...

    def compute_piece(self, order: Sequence[Rows], compiled: bool, shown: ShownRows | None) -> Tensor:
        """By the kernels in one call, or by torch: [rows, hidden]."""
        ...


@dataclass(slots=True)
class _Told:
    """Something that the others were told, and why each could not do it; None: not all have answered yet."""

    answers: list[str] | None = None


@dataclass(slots=True)
class Passed:
    """A step on its way through the stages."""

    place: int
    samples: int = 0
    told: list[_Told] = field(default_factory=list)


class Lead:
    """The other ranks of an engine. Belongs to the thread that computes steps, but for `watched`, `abandon` and what is
    about adapters."""

    leads = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        memory: PageMemory,
        fingerprint: str,
        *,
        stages: Sequence[range],
        copies: ExpertCopies | None = None,
        launch: Launch | None = None,
    ) -> None:
        """Starts the processes, which load their parts meanwhile. `memory` is shared; `stages` are the layers of
        each; `copies` are those of experts."""
        assert memory.arena is not None
        whole, ranks = checkpoint.config, config.tp
        self.vocab_size = whole.vocab_size
        self.stages, self.alone = len(stages), ranks == 1
        self.memory = memory
        self.window = PageWindow(memory, heads_of_rank(whole.kv.heads, ranks, 0))
        self._rank = Rank(0, ranks, config.ep, stages[0] if len(stages) > 1 else None, copies)
        self.checkpoint = part_of(checkpoint, self._rank, fingerprint)
        """What rank 0 has of the model."""
        self._columns = [len(share(whole.vocab_size, ranks, rank)) for rank in range(ranks)]
        self._whole = checkpoint
        self._teller = StepTeller()
        self._told: deque[_Told] = deque()
        """What they have not answered yet, in the order in which they will."""
        self._talking = Lock()
        """Whoever has it tells the others something; or has them load an adapter, for which steps wait."""
        self._hearing = Lock()
        """Whoever has it reads answers."""
        self._forgotten: deque[str] = deque()
        """Adapters that the others still keep."""
        self._arenas: list[Arena] = []
        self.shared: SharedGroup | None = None
        """Where the ranks of its stage add what they compute; None: by torch.distributed, or there is one."""
        sums = self._share(whole, config)
        self._group: RankGroup | None = self.shared
        self._lost: RankLost | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))
        self._passing: SharedMemory | None = None
        if self.stages > 1:
            room = PassingRoom.of(whole, config)
            arena = self._arena(room.layout)
            self._passing = SharedMemory.of(arena)
            self._states, self._logits = room.views(arena.slots())
            self._places = [*range(room.places)]
            """Free ones."""
        pipes = pipes_between(self.stages, ranks)
        self._pipes = pipes[0][0]
        self._followers: list[_Follower] = []
        try:
            for stage, rank in [(stage, rank) for stage in range(self.stages) for rank in range(ranks)][1:]:
                setup = Setup(
                    rank,
                    ranks,
                    stage,
                    [(own.start, own.stop) for own in stages],
                    settings_of(config),
                    fingerprint,
                    SharedMemory.of(memory.arena),
                    sums[stage],
                    self._passing,
                    self._meeting(stage),
                    copies,
                )
                self._followers.append(_Follower(setup, pipes[stage][rank], launch or RankProcess))
        except BaseException:
            for pipe in (pipe for own in pipes for pipe in own):
                pipe.close()
            self.close()
            raise

    def _share(self, model: ModelConfig, config: EngineConfig) -> list[SharedMemory | None]:
        """Where the ranks of each stage add what they compute."""
        if not config.kernels or config.tp == 1:
            return [None] * self.stages
        room = shared_room(model, config)
        arenas = [self._arena(shared_layout(config.tp, room)) for _ in range(self.stages)]
        try:
            self.shared = SharedGroup(arenas[0].slots(), 0, self._columns, room)
        except NotBuilt:
            return [None] * self.stages
        return [SharedMemory.of(arena) for arena in arenas]

    def _arena(self, layout: Layout) -> Arena:
        arena = Arena(layout.offset(1))
        self._arenas.append(arena)
        arena.format(layout)
        return arena

    def _meeting(self, stage: int) -> str:
        return str(self._directory / f"meeting-{stage}")

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
        if self._group is None and len(self._columns) > 1:
            self._group = TorchGroup(self._meeting(0), 0, self._columns)

    def add(self, own: Tensor) -> Tensor:
        """See RankGroup."""
        return own if self._group is None else self._group.add(own)

    @contextmanager
    def step(self, order: Sequence[Rows], compiled: bool, shown: ShownRows | None) -> Iterator[RankStep]:
        """Has the others compute a step too, whose logits are gathered from all. When the block ends, all have. Raises
        RankLost, from the first failure on always."""
        group = self._group
        assert group is not None

        def gather(own: Tensor) -> Tensor:
            found = group.gather(own)
            assert found is not None
            return found

        with self._together():
            told = self._tell(partial(self._teller.tell, order, compiled, shown=shown), shown)
            yield RankStep(None, gather, shown)
            self._done(told)

    def launch(self, order: Sequence[Rows], first: ComputesPieces) -> Passed:
        """Has a step computed by all stages, in pieces, and returns when the first has. There are as many steps on
        their way as stages at most. Raises as `step`."""
        pieces = [(piece, first.takes(piece), first.rows_shown(piece)) for piece in pieces_of(order, self.stages)]
        row = 0
        with self._together():
            passed = Passed(self._places.pop())
            for piece, compiled, shown in pieces:
                at = (passed.place, row, passed.samples)
                message = partial(self._teller.tell, piece, compiled, at=at, shown=shown)
                passed.told.append(self._tell(message, shown))
                states = first.compute_piece(piece, compiled, shown)
                self._states[0, passed.place, row : row + len(states)] = states
                self._pipes.tell()
                row += len(states)
                passed.samples += sum(run.samples for run in piece)
        return passed

    def logits(self, passed: Passed) -> Tensor:
        """What the last stage has made of a step, when it has; valid until another is launched. Raises as `step`."""
        with self._together():
            for told in passed.told:
                self._done(told)
        self._places.append(passed.place)
        return self._logits[passed.place, : passed.samples]

    def adapter(self, found: AdapterCheckpoint) -> AdapterCheckpoint:
        """Has the others load their parts of an adapter, for which steps wait; what rank 0 has of it. Callable from any
        thread. Raises CheckpointError, and RankLost."""
        with self._together(), self._talking:
            reasons = self._answers(self._send(partial(self._teller.adapter, found.path, found.fingerprint)))
        for reason in filter(None, reasons):
            raise CheckpointError(found.file, reason)
        return adapter_of_rank(found, self._whole, self._rank)

    def forget_adapter(self, fingerprint: str) -> None:
        """The others let go of an adapter with the next message. Callable from any thread."""
        self._forgotten.append(fingerprint)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """The others do what this one does. Raises RankLost, from the first failure on always."""
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except Exception as error:  # where the others are now is not known
            self._lost = error if isinstance(error, RankLost) else RankLost(f"a step failed in some ranks: {error}")
            self.abandon()
            raise self._lost from error

    def _tell(self, message: Callable[[list[str]], bytes], shown: ShownRows | None) -> _Told:
        """`message` is made of the adapters that are needed no more; the first stage gets the embeddings of pictures
        behind it."""
        with self._talking:
            return self._send(message, shown)

    def _send(self, message: Callable[[list[str]], bytes], shown: ShownRows | None = None) -> _Told:
        told = _Told()
        content = message([self._forgotten.popleft() for _ in range(len(self._forgotten))])
        embeddings = None if shown is None else shown.embeddings.float().numpy().tobytes()
        for follower in self._followers:
            follower.tell(content)
            if embeddings is not None and follower.stage == 0:
                follower.tell(embeddings)
        self._told.append(told)
        return told

    def _answers(self, told: _Told) -> list[str]:
        """Waits until all have done what they were told: why each could not, or nothing. Raises RankLost."""
        while told.answers is None:
            with self._hearing:
                if told.answers is None:
                    self._told[0].answers = [follower.answer() for follower in self._followers]
                    self._told.popleft()
        return told.answers

    def _done(self, told: _Told) -> None:
        """Raises RankLost, also when some could not do what they were told."""
        for reason in filter(None, self._answers(told)):
            raise RankLost(reason)

    def abandon(self) -> None:
        """Ends the other processes: whoever waits for one of them hears of it. Callable from any thread."""
        if self.shared is not None:
            self.shared.close()
        for follower in self._followers:
            follower.process.kill()

    def close(self) -> None:
        """Ends the other processes."""
        self._pipes.close()
        for follower in self._followers:
            follower.leave()
        for follower in self._followers:
            follower.end()
        if self._group is not None:
            self._group.close()
            self._group = None
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()
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

    def __init__(self, setup: Setup, pipes: Pipes, launch: Launch) -> None:
        self.stage = setup.stage
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_LOAD_S)
        with theirs:
            self.process = launch(theirs)
        try:
            send(self._socket, msgspec.msgpack.encode(setup))
            pipes.send(self._socket)
        except OSError as error:  # it is noticed when it should have loaded
            _log.debug("a process that computes a part of the model has ended at once: %s", error)
        finally:
            pipes.close()

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
