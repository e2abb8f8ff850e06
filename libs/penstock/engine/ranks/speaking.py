"""What speaks for a stage on another host: to rank 0 it is a process that follows."""

from __future__ import annotations

import socket
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

import msgspec

from penstock.checkpoint import inspect
from penstock.engine.errors import RankLost
from penstock.engine.ranks.distance import (
    ENCODER,
    FROM_STAGE,
    Answered,
    Distance,
    Given,
    LayerPages,
    PiecePlace,
    StageTold,
    StatesPassed,
    fill,
)
from penstock.engine.ranks.messages import Setup, TableListener, ToldAdapter, receive, send
from penstock.engine.ranks.stages import PassingRoom, Pipes


def speak(lead: socket.socket, stage: Distance) -> None:
    """Tells the stage what rank 0 tells, and rank 0 what the stage answers, until one of them ends; then the other does
    as well. Raises RankLost, CheckpointError, MapError."""
    pipes = Pipes(None, ())
    hearing: Thread | None = None
    try:
        first = receive(lead)
        setup = msgspec.msgpack.decode(first, type=Setup)
        pipes = Pipes.receive(lead, setup.pipes, reads=True)
        stage.send(bytes(first))
        speaker = _Speaker(setup, pipes, lead, stage)
        hearing = Thread(target=speaker.hear, name="hear", daemon=True)
        hearing.start()
        speaker.tell()
    except (EOFError, ConnectionError):
        return
    finally:
        stage.close()
        if hearing is not None:
            hearing.join()
        pipes.close()


class _Speaker:
    def __init__(self, setup: Setup, pipes: Pipes, lead: socket.socket, stage: Distance) -> None:
        config = setup.engine
        model = inspect(config.model, config.max_model_len or None).config
        assert setup.passing is not None
        self._setup, self._pipes, self._lead, self._stage = setup, pipes, lead, stage
        pages = setup.pages.mapped(LayerPages.layout(model, config))
        self._pages = LayerPages(pages.slots(), model, config, range(*setup.stages[setup.stage]))
        room = PassingRoom.of(model, config)
        passing = setup.passing.mapped(room.layout)
        self._maps = [pages, passing]
        states, logits = room.views(passing.slots())
        self._before = states[setup.stage - 1].numpy()
        self._behind = states[setup.stage].numpy() if setup.tells else None
        self._logits = logits.numpy()
        self._passing: SimpleQueue[PiecePlace] = SimpleQueue()
        """Pieces that the stage has not passed on yet."""
        self._asked: SimpleQueue[PiecePlace | None] = SimpleQueue()
        """What it has not answered yet: a piece, or None for something else."""

    def tell(self) -> None:
        """Raises EOFError or ConnectionError when rank 0 has ended, and RankLost when the stage before has."""
        tables = TableListener()
        self._asked.put(None)  # it says when it has loaded
        while True:
            message = receive(self._lead)
            heard = tables.hear(message)
            if isinstance(heard, ToldAdapter):
                self._asked.put(None)
                self._send(StageTold(bytes(message), [], b""))
                continue
            told, runs = heard
            piece = PiecePlace.of(told, runs, self._pages.block_size)
            self._asked.put(piece)
            if self._behind is not None:
                self._passing.put(piece)
            self._send(StageTold(bytes(message), told.written, self._pages.read(told.written)))
            self._pipes.wait()
            self._send(Given(self._before[piece.place, piece.row : piece.row + piece.rows].tobytes()))

    def hear(self) -> None:
        """Until the stage ends; then rank 0 hears of it."""
        with suppress(EOFError, OSError, RankLost):
            while True:
                heard = FROM_STAGE.decode(self._stage.receive())
                if isinstance(heard, StatesPassed):
                    self._pass_on(heard)
                else:
                    self._answer(heard)
        with suppress(OSError):
            self._lead.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, passed: StatesPassed) -> None:
        assert self._behind is not None
        piece = self._passing.get_nowait()
        fill(self._behind[piece.place, piece.row : piece.row + piece.rows], passed.states)
        self._pipes.tell()

    def _answer(self, answered: Answered) -> None:
        piece = self._asked.get_nowait()
        if piece is not None and not answered.reason:
            self._pages.keep(piece, answered.vectors)
            if self._behind is None:
                fill(self._logits[piece.place, piece.sample : piece.sample + piece.samples], answered.logits)
        send(self._lead, answered.reason.encode())

    def _send(self, content: StageTold | Given) -> None:
        self._stage.send(ENCODER.encode(content))
