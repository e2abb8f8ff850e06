"""What speaks for a stage on another host: to rank 0 it is a process that follows."""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

import msgspec
import numpy as np

from penstock.checkpoint import inspect
from penstock.engine.errors import RankLost
from penstock.engine.ranks.distance import (
    ENCODER,
    FROM_STAGE,
    Answered,
    Distance,
    Given,
    LayerPages,
    Leaving,
    PagesWritten,
    PiecePlace,
    StageTold,
    StatesPassed,
    VectorsKept,
    fill,
)
from penstock.engine.ranks.messages import Setup, TableListener, ToldAdapter, receive, send
from penstock.engine.ranks.stages import PassingRoom, Pipes, taps_of

_log = logging.getLogger(__name__)


def speak(lead: socket.socket, stage: Distance, leaves: Callable[[], object] = lambda: None) -> None:
    """Tells the stage what rank 0 tells, and rank 0 what the stage answers, until one of them ends; then the other does
    as well. `leaves` is called when the stage's host says that it will end. Raises RankLost, CheckpointError, MapError.
    """
    pipes = Pipes(None, ())
    hearing: Thread | None = None
    try:
        first = receive(lead)
        setup = msgspec.msgpack.decode(first, type=Setup)
        pipes = Pipes.receive(lead, setup.pipes, reads=True)
        stage.send(bytes(first))
        speaker = _Speaker(setup, pipes, lead, stage)
        hearing = Thread(target=speaker.hear, args=(leaves,), name="hear", daemon=True)
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
        room = PassingRoom.of(model, config, setup.taps)
        passing = setup.passing.mapped(room.layout)
        self._maps = [pages, passing]
        states, logits, features, counted = room.views(passing.slots())
        self._features, self._taps = features.numpy(), taps_of(setup.taps, range(*setup.stages[setup.stage]))
        self._counted = counted[slice(*setup.stages[setup.stage])]
        self._before = states[setup.stage - 1].numpy()
        self._behind = states[setup.stage].numpy() if setup.tells else None
        self._logits = logits.numpy()
        self._passing: deque[PiecePlace] = deque()
        """Pieces that the stage has not passed on yet."""
        self._asked: deque[PiecePlace | None] = deque([None])
        """What it has not answered yet: a piece, or None for something else. First it says when it has loaded."""
        self._kept = 0
        """Tokens of the first of these of which the vectors have come."""

    def tell(self) -> None:
        """Raises EOFError or ConnectionError when rank 0 has ended, and RankLost when the stage before has."""
        tables = TableListener()
        while True:
            message = receive(self._lead)
            heard = tables.hear(message)
            if isinstance(heard, ToldAdapter):
                self._asked.append(None)
                self._send(StageTold(bytes(message)))
                continue
            told, runs = heard
            piece = PiecePlace.of(told, runs, self._pages.block_size)
            self._asked.append(piece)
            if self._behind is not None:
                self._passing.append(piece)
            for first in range(0, len(told.written), self._pages.pages):
                some = told.written[first : first + self._pages.pages]
                self._send(PagesWritten(some, self._pages.read(some)))
            self._send(StageTold(bytes(message)))
            self._pipes.wait()
            self._send(Given(self._before[piece.place, piece.row : piece.row + piece.rows].tobytes()))

    def hear(self, leaves: Callable[[], object]) -> None:
        """Until the stage ends; then rank 0 hears of it."""
        try:
            while True:
                match FROM_STAGE.decode(self._stage.receive()):
                    case StatesPassed(states):
                        self._pass_on(states)
                    case VectorsKept(vectors):
                        piece = self._asked[0]
                        assert piece is not None
                        self._kept = self._pages.keep(piece, self._kept, vectors)
                    case Answered() as answered:
                        self._answer(answered)
                    case Leaving():
                        leaves()
        except (EOFError, OSError, RankLost):
            pass  # one of both has ended
        except Exception:
            _log.exception("the host of stage %d says what no stage does", self._setup.stage)
        finally:
            with suppress(OSError):
                self._lead.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, states: bytes) -> None:
        assert self._behind is not None
        piece = self._passing.popleft()
        fill(self._behind[piece.place, piece.row : piece.row + piece.rows], states)
        self._pipes.tell()

    def _answer(self, answered: Answered) -> None:
        piece = self._asked.popleft()
        self._kept = 0
        if piece is not None and not answered.reason:
            if self._behind is None:
                fill(self._logits[piece.place, piece.sample : piece.sample + piece.samples], answered.logits)
            fill(self._features[piece.in_features(self._taps)], answered.features)
        if answered.counted:
            self._counted += np.frombuffer(answered.counted, np.uint32).reshape(self._counted.shape)
        send(self._lead, answered.reason.encode())

    def _send(self, content: PagesWritten | StageTold | Given) -> None:
        self._stage.send(ENCODER.encode(content))
