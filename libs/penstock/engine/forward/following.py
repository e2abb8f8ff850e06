"""`python -m penstock.engine.forward.following`: a rank that follows another process, with a socket as its standard
input. It computes what it is told until the other side ends.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.checkpoint import (
    AdapterCheckpoint,
    CheckpointError,
    Rank,
    adapter_of_rank,
    inspect,
    inspect_adapter,
    part_of,
)
from penstock.checkpoint.split import heads_of_rank, share
from penstock.engine.errors import RankLost
from penstock.engine.forward.model import set_threads
from penstock.engine.forward.runner import CACHE, Runner
from penstock.engine.kernels.cpu.meeting import SharedGroup
from penstock.engine.pictures.shown import ShownRows
from penstock.engine.ranks.apart import PagesApart
from penstock.engine.ranks.group import RankGroup, open_group, shared_layout, shared_room
from penstock.engine.ranks.messages import PassedAt, Setup, StepListener, ToldAdapter, receive, send
from penstock.engine.ranks.parent import with_parent
from penstock.engine.ranks.place import RankStep, rank_config
from penstock.engine.ranks.stages import PassingRoom, Pipes, put_features, taps_of
from penstock.engine.ranks.window import PageWindow
from penstock.engine.step.batch import Rows
from penstock.engine.step.features import Features
from penstock.engine.step.memory import PageMemory
from penstock.kv.bytes.arena import Layout


class Following:
    """The place of a rank other than 0, as a Runner sees it."""

    leads = False

    def __init__(self, setup: Setup, pipes: Pipes) -> None:
        """Raises CheckpointError, MapError."""
        config = rank_config(setup.engine, setup.stage, setup.rank)
        self._pipes = pipes
        self.at = PassedAt()
        """Of the step."""
        self.shown: ShownRows | None = None
        """Of the step, in the first stage."""
        self.changed: tuple[Sequence[int], Sequence[int]] = ((), ())
        """Pages that were written before the step, and those that were cleared."""
        self._apart: PagesApart | None = None
        self.stages, self.alone = len(setup.stages), setup.ranks == 1
        own = range(*setup.stages[setup.stage])
        whole = inspect(config.model, config.max_model_len or None)
        self.setup, self.config, self.whole = setup, config, whole
        self._rank = Rank(setup.rank, setup.ranks, config.ep, own if self.stages > 1 else None, setup.copies)
        self.checkpoint = part_of(whole, self._rank, setup.fingerprint)
        model = whole.config
        self.vocab_size = model.vocab_size
        layout = Layout.gapless(config.pages + 1, PageMemory.page_bytes(model, config.block_size, CACHE[config.kv]))
        self._maps = [setup.pages.mapped(layout)]
        self.memory = PageMemory(
            model,
            config.pages,
            config.block_size,
            CACHE[config.kv],
            torch.device("cpu"),
            content=self._maps[0].slots(),
        )
        self.window = PageWindow(self.memory, heads_of_rank(model.kv.heads, setup.ranks, setup.rank))
        self._columns = [len(share(model.vocab_size, setup.ranks, rank)) for rank in range(setup.ranks)]
        self.shared: SharedGroup | None = None
        if setup.sums is not None:
            room = shared_room(model, config)
            self._maps.append(setup.sums.mapped(shared_layout(setup.ranks, room)))
            self.shared = SharedGroup(self._maps[1].slots(), setup.rank, self._columns, room)
        self._group: RankGroup | None = self.shared
        self.counted: NDArray[np.int64] | None = None
        self.taps = setup.taps if setup.rank == 0 else ()
        if setup.passing is not None:
            between = PassingRoom.of(whole.config, config, setup.taps)
            self._maps.append(setup.passing.mapped(between.layout))
            self._states, self._logits, self._features, counted = between.views(self._maps[-1].slots())
            if setup.rank == 0 and model.experts is not None:  # one of each stage counts for all
                self.counted = counted

    def meet(self) -> None:
        """Returns when all ranks are there. Raises RankLost."""
        setup = self.setup
        if self._group is None and setup.ranks > 1:
            self._group = open_group(setup.meeting, setup.rank, self._columns, self.config)

    def add(self, own: Tensor) -> Tensor:
        """See RankGroup."""
        return own if self._group is None else self._group.add(own)

    def close(self) -> None:
        """Leaves a group of torch's. One in shared memory is rank 0's."""
        if self._group is not None and self._group is not self.shared:
            self._group.close()

    def pages_at(self, place: torch.device) -> PageMemory:
        """See RankPlace."""
        self._apart = PagesApart(self.memory, self.checkpoint, place)
        return self._apart.own

    def adapter(self, found: AdapterCheckpoint) -> AdapterCheckpoint:
        """What this rank has of it."""
        return adapter_of_rank(found, self.whole, self._rank)

    def forget_adapter(self, fingerprint: str) -> None:
        """Rank 0 alone says what is forgotten."""

    @contextmanager
    def step(self, order: Sequence[Rows], compiled: bool, shown: ShownRows | None) -> Iterator[RankStep]:
        """Waits for the stage before; what this one makes of the rows goes to the next, logits to rank 0. Rank 0 has
        said what is shown."""
        stage, (place, row, sample, _) = self.setup.stage, self.at
        states = None
        if self._apart is not None:
            self._apart.bring(*self.changed)
        if stage:
            self._pipes.wait()
            states = self._states[stage - 1, place, row : row + sum(run.tokens for run in order)]

        def give(own: Tensor) -> Tensor:
            last, first = stage + 1 == self.stages, self.setup.rank == 0
            if last and self._group is not None:
                found = self._group.gather(own)
                own = own if found is None else found
            if self._group is not None:
                self._group.wait()
            if last and first and stage:
                self._logits[place, sample : sample + len(own)].copy_(own)
            elif first and not last:
                self._states[stage, place, row : row + len(own)].copy_(own)
                self._pipes.tell()
            return own

        yield RankStep(states, give, self.shown)
        if self._apart is not None:
            self._apart.take_back(order)

    def give_features(self, features: Features) -> None:
        """To rank 0, which knows of them when the step is answered."""
        own = taps_of(self.taps, range(*self.setup.stages[self.setup.stage]))
        put_features(self._features, self.at, own, features)


def follow(lead: socket.socket) -> None:
    """Computes what rank 0 tells until that ends. What goes wrong is told to rank 0, and raised: RankLost when another
    rank has ended, CheckpointError and ConfigError for its part of the model."""
    pipes, place = Pipes(None, ()), None
    try:
        setup = msgspec.msgpack.decode(receive(lead), type=Setup)
        pipes = Pipes.receive(lead, setup.pipes, reads=setup.stage > 0)
        set_threads(setup.engine.threads)
        place = Following(setup, pipes)
        runner = Runner(place.checkpoint, place.config, place)
        send(lead, b"")
        place.meet()
        listener = StepListener()
        while True:
            told = listener.hear(receive(lead))
            if isinstance(told, ToldAdapter):
                send(lead, _load_adapter(told, place, runner, listener).encode())
                continue
            place.at, place.changed = told.at, (told.written, told.cleared)
            place.shown = _shown(told.shown, lead) if told.shown and not setup.stage else None
            features = runner.features(told.runs)
            with torch.inference_mode():
                runner.compute(told.runs, told.compiled, features)
            if features is not None:
                place.give_features(features)
            send(lead, b"")
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        with suppress(OSError):
            send(lead, f"a process that computes a part of the model: {error}".encode())
        raise
    finally:
        pipes.close()
        if place is not None:
            place.close()


def _shown(rows: list[int], lead: socket.socket) -> ShownRows:
    """What rank 0 has computed for these rows, in the next message."""
    embeddings = torch.frombuffer(receive(lead), dtype=torch.float32).view(len(rows), -1)
    return ShownRows(torch.tensor(rows), embeddings)


def _load_adapter(told: ToldAdapter, place: Following, runner: Runner, listener: StepListener) -> str:
    """Why it cannot be loaded, or nothing."""
    try:
        found = inspect_adapter(told.path, place.whole.config)
        if found.fingerprint != told.fingerprint:
            return "has changed while it was loaded"
        listener.keep(runner.load_adapter(found))
    except CheckpointError as error:
        return str(error)
    return ""


def main() -> None:
    """Follows the process whose socket is the standard input."""
    with_parent()
    with socket.socket(fileno=os.dup(0)) as lead:
        try:
            follow(lead)
        except RankLost as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
