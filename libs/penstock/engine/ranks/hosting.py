"""A stage on a host that has not rank 0: its ranks, and the memory that they share here."""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import tempfile
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import msgspec
import numpy as np

from penstock.checkpoint import Checkpoint, CheckpointError, inspect
from penstock.checkpoint.split import share
from penstock.engine.config import EngineConfig
from penstock.engine.errors import RankLost
from penstock.engine.kernels.cpu.build import NotBuilt
from penstock.engine.kernels.cpu.meeting import SharedGroup
from penstock.engine.ranks.distance import (
    ENCODER,
    TO_STAGE,
    Answered,
    Distance,
    Given,
    LayerPages,
    PagesWritten,
    PiecePlace,
    StageTold,
    StatesPassed,
    VectorsKept,
    fill,
)
from penstock.engine.ranks.followers import Launch, RankFollower, RankProcess
from penstock.engine.ranks.group import shared_layout, shared_room
from penstock.engine.ranks.messages import Setup, SharedMemory, TableListener, ToldAdapter
from penstock.engine.ranks.stages import PassingRoom, Pipes, taps_of
from penstock.kv.bytes.arena import Arena, Layout
from penstock.runtime.cores import available_cores

_log = logging.getLogger(__name__)


def host_stage(lead: Distance, model: Path, fingerprint: str, threads: int, launch: Launch = RankProcess) -> None:
    """Computes a stage for the worker at the other side until one of both ends. `model` is the model's directory here,
    of that fingerprint; `threads` are those of each rank, 0: this process's cores, divided among them. Blocks; the
    caller's thread has to live as long as the ranks. The worker is told why when it can't be, or ends."""
    setup = None
    with suppress(EOFError), ExitStack() as stack:
        stack.callback(lead.close)
        try:
            setup = msgspec.msgpack.decode(lead.receive(), type=Setup)
            whole = _same(setup, model, fingerprint)
            each = threads or max(1, available_cores() // setup.ranks)
            setup = msgspec.structs.replace(setup, config=setup.config | {"model": str(model), "threads": each})
            _HostedStage(setup, whole, lead, launch, stack).serve()
        except EOFError:
            raise
        except CheckpointError as error:
            _refuse(lead, setup, error)
            _log.error("the stage can't be computed: %s", error)
        except Exception as error:
            _refuse(lead, setup, error)
            _log.exception("the stage can't be computed")


def _refuse(lead: Distance, setup: Setup | None, error: Exception) -> None:
    stage = "a stage" if setup is None else f"stage {setup.stage}"
    lead.send(ENCODER.encode(Answered(f"the host of {stage}: {error}")))


def _same(setup: Setup, model: Path, fingerprint: str) -> Checkpoint:
    """The model here, which has to be the worker's. Raises CheckpointError."""
    whole = inspect(model, setup.engine.max_model_len or None)
    if fingerprint != setup.fingerprint:
        raise CheckpointError(whole.path, "is another model than the worker's, or has other weights")
    return whole


class _HostedStage:
    def __init__(self, setup: Setup, whole: Checkpoint, lead: Distance, launch: Launch, stack: ExitStack) -> None:
        """What it opens is closed with `stack`."""
        config, model = setup.engine, whole.config
        self._setup, self._lead, self._stack = setup, lead, stack
        pages = self._arena(LayerPages.layout(model, config))
        self._pages = LayerPages(pages.slots(), model, config, range(*setup.stages[setup.stage]))
        room = PassingRoom.of(model, config, setup.taps)
        passing = self._arena(room.layout)
        states, logits, features, counted = room.views(passing.slots())
        self._features, self._taps = features.numpy(), taps_of(setup.taps, range(*setup.stages[setup.stage]))
        self._counted = counted[slice(*setup.stages[setup.stage])]
        self._known_counts = np.zeros_like(self._counted)
        """Those that the worker knows."""
        self._before = states[setup.stage - 1].numpy()
        self._behind = states[setup.stage].numpy() if setup.tells else None
        self._logits = logits.numpy()
        self._told: deque[PiecePlace | None] = deque([None])
        """What the ranks have not answered yet: a piece, or None for something else. First they say when they have
        loaded."""
        self._given: deque[PiecePlace] = deque()
        """Pieces to which what the stage before has made has not come yet."""
        self._passing: SimpleQueue[PiecePlace] = SimpleQueue()
        """Pieces that the stage has not passed on yet."""
        self._group: SharedGroup | None = None
        sums = self._sums(whole, config)
        meeting = ""
        if sums is None and setup.ranks > 1:
            directory = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            meeting = str(directory / "meeting")
        self._source, heard = os.pipe()
        stack.callback(os.close, self._source)
        self._to: list[int] = []
        """Pipes to all ranks: a byte says that rows are there."""
        self._followers: list[RankFollower] = []
        try:
            for rank in range(setup.ranks):
                first = rank == 0 and setup.tells > 0
                own = msgspec.structs.replace(
                    setup,
                    rank=rank,
                    pages=SharedMemory.of(pages),
                    passing=SharedMemory.of(passing),
                    sums=sums,
                    meeting=meeting,
                    tells=int(first),
                )
                source, to = os.pipe()
                self._to.append(to)
                stack.callback(os.close, to)
                follower = RankFollower(own, Pipes(source, [os.dup(heard)] if first else []), launch)
                self._followers.append(follower)
                stack.callback(follower.end)
                stack.callback(follower.leave)
        finally:
            os.close(heard)

    def _arena(self, layout: Layout) -> Arena:
        arena = Arena(layout.offset(layout.slots))
        self._stack.callback(arena.close)
        arena.format(layout)
        return arena

    def _sums(self, whole: Checkpoint, config: EngineConfig) -> SharedMemory | None:
        """Where the ranks add what they compute; None: by torch.distributed."""
        ranks = self._setup.ranks
        if not config.kernels or ranks == 1 or config.device != "cpu":
            return None
        room = shared_room(whole.config, config)
        arena = self._arena(shared_layout(ranks, room))
        columns = [len(share(whole.config.vocab_size, ranks, rank)) for rank in range(ranks)]
        try:
            self._group = SharedGroup(arena.slots(), 0, columns, room)
        except NotBuilt:
            return None
        return SharedMemory.of(arena)

    def serve(self) -> None:
        """Raises EOFError when the worker has ended, or a rank."""
        threads = [Thread(target=self._answer, name="answers", daemon=True)]
        if self._behind is not None:
            threads.append(Thread(target=self._pass_on, name="passes", daemon=True))
        for thread in threads:
            thread.start()
        tables = TableListener()
        try:
            while True:
                self._obey(TO_STAGE.decode(self._lead.receive()), tables)
        except RankLost as error:
            raise EOFError from error
        finally:  # with the ranks the threads end
            if self._group is not None:
                self._group.close()
            for follower in self._followers:
                follower.process.kill()
            for thread in threads:
                thread.join()

    def _obey(self, heard: PagesWritten | StageTold | Given, tables: TableListener) -> None:
        match heard:
            case PagesWritten(pages, content):
                self._pages.write(pages, content)
            case Given(states):
                self._give(self._given.popleft(), states)
            case StageTold(message):
                self._tell(message, tables)

    def _tell(self, message: bytes, tables: TableListener) -> None:
        told = tables.hear(message)
        if isinstance(told, ToldAdapter):
            self._told.append(None)
        else:
            step, runs = told
            piece = PiecePlace.of(step, runs, self._pages.block_size)
            self._pages.clear(step.cleared)
            self._given.append(piece)
            if self._behind is not None:
                self._passing.put(piece)
            self._told.append(piece)
        for follower in self._followers:
            follower.tell(message)

    def _give(self, piece: PiecePlace, states: bytes) -> None:
        fill(self._before[piece.place, piece.row : piece.row + piece.rows], states)
        for to in self._to:
            with suppress(OSError):  # a rank that has ended is noticed by its socket
                os.write(to, b".")

    def _pass_on(self) -> None:
        """Sends what the stage has made of each piece, until the ranks end."""
        assert self._behind is not None
        while os.read(self._source, 1):
            piece = self._passing.get()
            rows = self._behind[piece.place, piece.row : piece.row + piece.rows]
            self._lead.send(ENCODER.encode(StatesPassed(rows.tobytes())))

    def _answer(self) -> None:
        """Sends what the ranks answer, when all have, until one of them ends; then the worker hears of it."""
        waiting: dict[RankFollower, deque[str]] = {follower: deque() for follower in self._followers}
        try:
            with selectors.DefaultSelector() as ready:
                for follower in waiting:
                    ready.register(follower.socket, selectors.EVENT_READ, follower)
                while True:
                    for key, _ in ready.select():
                        waiting[key.data].append(key.data.answer())
                    while all(waiting.values()):
                        self._send([reasons.popleft() for reasons in waiting.values()])
        except RankLost as error:
            said = next(filter(None, (reason for reasons in waiting.values() for reason in reasons)), str(error))
            _log.info("stage %d: %s", self._setup.stage, said)
            self._lead.send(ENCODER.encode(Answered(said)))
        finally:
            self._lead.close()

    def _send(self, reasons: list[str]) -> None:
        """What all have answered. Raises RankLost when they were told nothing."""
        reason = next(filter(None, reasons), "")
        if not self._told:
            raise RankLost(reason or "a process that computes a part of the model says what nobody asked")
        piece, answered = self._told.popleft(), Answered(reason)
        if piece is not None and not reason:
            for vectors in self._pages.vectors(piece):
                self._lead.send(ENCODER.encode(VectorsKept(vectors)))
            if self._behind is None:
                answered.logits = self._logits[piece.place, piece.sample : piece.sample + piece.samples].tobytes()
            answered.counted = self._new_counts()
            answered.features = self._features[piece.in_features(self._taps)].tobytes()
        self._lead.send(ENCODER.encode(answered))

    def _new_counts(self) -> bytes:
        """Rows that have chosen each expert since the last call."""
        before, self._known_counts = self._known_counts, self._counted.copy()
        return (self._known_counts - before).astype(np.uint32).tobytes()
