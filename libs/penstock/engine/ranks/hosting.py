"""A stage on a host that has not rank 0: its ranks, and the memory that they share here."""

from __future__ import annotations

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

from penstock.checkpoint import Checkpoint, CheckpointError, inspect, remembered_fingerprint
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
    PiecePlace,
    StageTold,
    StatesPassed,
    fill,
)
from penstock.engine.ranks.followers import Launch, RankFollower, RankProcess
from penstock.engine.ranks.group import shared_layout, shared_room
from penstock.engine.ranks.messages import Setup, SharedMemory, TableListener, ToldAdapter
from penstock.engine.ranks.stages import PassingRoom, Pipes
from penstock.kv.bytes.arena import Arena, Layout


def host_stage(lead: Distance, model: Path, threads: int, launch: Launch = RankProcess) -> None:
    """Computes a stage for the worker at the other side until one of both ends. `model` is the model's directory here;
    `threads` are those of each rank, 0: as many as the worker's have. Blocks; the caller's thread has to live as long
    as the ranks. What is wrong with the model is told to the worker, and raised: CheckpointError."""
    with suppress(EOFError), ExitStack() as stack:
        stack.callback(lead.close)
        setup = msgspec.msgpack.decode(lead.receive(), type=Setup)
        try:
            whole = _same(setup, model)
        except CheckpointError as error:
            lead.send(ENCODER.encode(Answered(f"the host of stage {setup.stage}: {error}")))
            raise
        engine = setup.engine
        settings = setup.config | {"model": str(model), "threads": threads or engine.threads}
        setup = msgspec.structs.replace(setup, config=settings)
        _HostedStage(setup, whole, lead, launch, stack).serve()


def _same(setup: Setup, model: Path) -> Checkpoint:
    """The model here, which has to be the worker's. Raises CheckpointError."""
    whole = inspect(model, setup.engine.max_model_len or None)
    if remembered_fingerprint(whole) != setup.fingerprint:
        raise CheckpointError(whole.path, "is another model than the worker's, or has other weights")
    return whole


class _HostedStage:
    def __init__(self, setup: Setup, whole: Checkpoint, lead: Distance, launch: Launch, stack: ExitStack) -> None:
        """What it opens is closed with `stack`."""
        config, model = setup.engine, whole.config
        self._setup, self._lead, self._stack = setup, lead, stack
        layout = LayerPages.layout(model, config)
        pages = self._arena(layout)
        self._pages = LayerPages(pages.slots(), model, config, range(*setup.stages[setup.stage]))
        room = PassingRoom.of(model, config)
        passing = self._arena(room.layout)
        states, logits = room.views(passing.slots())
        self._before = states[setup.stage - 1].numpy()
        self._behind = states[setup.stage].numpy() if setup.tells else None
        self._logits = logits.numpy()
        self._group: SharedGroup | None = None
        sums = self._sums(whole, config)
        directory = tempfile.mkdtemp(prefix="penstock-stage-")
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        self._source, heard = os.pipe()
        stack.callback(os.close, self._source)
        self._given: list[int] = []
        """Pipes to all ranks: a byte says that rows are there."""
        self._followers: list[RankFollower] = []
        for rank in range(setup.ranks):
            source, to = os.pipe()
            self._given.append(to)
            stack.callback(os.close, to)
            own = msgspec.structs.replace(
                setup,
                rank=rank,
                pages=SharedMemory.of(pages),
                passing=SharedMemory.of(passing),
                sums=sums,
                meeting=str(Path(directory) / "meeting"),
                tells=int(rank == 0 and setup.tells > 0),
            )
            pipes = Pipes(source, [heard] if own.tells else [])
            follower = RankFollower(own, pipes, launch)
            self._followers.append(follower)
            stack.callback(follower.end)
            stack.callback(follower.leave)
        if not setup.tells:
            os.close(heard)
        self._told: SimpleQueue[PiecePlace | None] = SimpleQueue()
        """What the ranks have not answered yet: a piece, or None for something else."""
        self._passing: SimpleQueue[PiecePlace] = SimpleQueue()

    def _arena(self, layout: Layout) -> Arena:
        arena = Arena(layout.offset(layout.slots))
        self._stack.callback(arena.close)
        arena.format(layout)
        return arena

    def _sums(self, whole: Checkpoint, config: EngineConfig) -> SharedMemory | None:
        """Where the ranks add what they compute; None: by torch.distributed."""
        ranks = self._setup.ranks
        if not config.kernels or ranks == 1:
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
        """Raises EOFError when the worker has ended."""
        self._told.put(None)  # they say when they have loaded
        threads = [Thread(target=self._answer, name="answers", daemon=True)]
        if self._behind is not None:
            threads.append(Thread(target=self._pass_on, name="passes", daemon=True))
        for thread in threads:
            thread.start()
        # They end when the ranks have.
        tables = TableListener()
        pieces: deque[PiecePlace] = deque()
        try:
            while True:
                heard = TO_STAGE.decode(self._lead.receive())
                if isinstance(heard, Given):
                    self._give(pieces.popleft(), heard)
                else:
                    self._tell(heard, tables, pieces)
        except RankLost as error:
            raise EOFError from error
        finally:
            if self._group is not None:
                self._group.close()
            for follower in self._followers:
                follower.process.kill()
            for thread in threads:
                thread.join()

    def _tell(self, heard: StageTold, tables: TableListener, pieces: deque[PiecePlace]) -> None:
        told = tables.hear(heard.message)
        if isinstance(told, ToldAdapter):
            self._told.put(None)
        else:
            step, runs = told
            piece = PiecePlace.of(step, runs, self._pages.block_size)
            self._pages.clear(step.cleared)
            self._pages.write(step.written, heard.content)
            pieces.append(piece)
            if self._behind is not None:
                self._passing.put(piece)
            self._told.put(piece)
        for follower in self._followers:
            follower.tell(heard.message)

    def _give(self, piece: PiecePlace, given: Given) -> None:
        fill(self._before[piece.place, piece.row : piece.row + piece.rows], given.states)
        for to in self._given:
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
        with selectors.DefaultSelector() as ready, suppress(RankLost):
            for follower in waiting:
                ready.register(follower.socket, selectors.EVENT_READ, follower)
            while True:
                for key, _ in ready.select():
                    waiting[key.data].append(key.data.answer())
                while all(waiting.values()):
                    self._send([reasons.popleft() for reasons in waiting.values()])
        self._lead.close()

    def _send(self, reasons: list[str]) -> None:
        piece = self._told.get()
        reason = next(filter(None, reasons), "")
        if piece is None or reason:
            self._lead.send(ENCODER.encode(Answered(reason)))
            return
        logits = b""
        if self._behind is None:
            logits = self._logits[piece.place, piece.sample : piece.sample + piece.samples].tobytes()
        self._lead.send(ENCODER.encode(Answered("", self._pages.vectors(piece), logits)))
