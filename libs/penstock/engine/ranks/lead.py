"""Rank 0's side: the other processes, and the steps that they are told."""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
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
from penstock.engine.ranks.apart import PagesApart
from penstock.engine.ranks.followers import STEP_S, Launch, RankFollower, RankProcess
from penstock.engine.ranks.group import RankGroup, open_group, shared_layout, shared_room
from penstock.engine.ranks.messages import PassedAt, Setup, SharedMemory, StepTeller, settings_of
from penstock.engine.ranks.place import RankStep, rank_config
from penstock.engine.ranks.stages import PassingRoom, pieces_of, pipes_between, put_features, taps_of
from penstock.engine.ranks.window import PageWindow
from penstock.engine.step.batch import Rows
from penstock.engine.step.changes import PageChanges
from penstock.engine.step.features import Features
from penstock.engine.step.memory import PageMemory
from penstock.kv.bytes.arena import Arena, Layout


class ComputesPieces(Protocol):
    """What computes the first stage; a Runner."""

    def takes(self, runs: Sequence[Rows]) -> bool:
        """Whether the kernels compute these rows in one call."""
        ...

    def rows_shown(self, order: Sequence[Rows]) -> ShownRows | None:
        """What stands in the place of their tokens' embeddings."""
        ...

    def features(self, order: Sequence[Rows]) -> Features | None:
        """Room for what the layers of this stage say of rows that have features; None: they are not asked."""
        ...

    def compute_piece(
        self, order: Sequence[Rows], compiled: bool, shown: ShownRows | None, features: Features | None
    ) -> Tensor:
        """By the kernels in one call, or by torch: [rows, hidden]; fills `features`."""
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
    features: int = 0
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
        taps: tuple[int, ...] = (),
        launch: Launch | None = None,
        away: Sequence[Launch] = (),
    ) -> None:
        """Starts the processes, which load their parts meanwhile. `memory` is shared; `stages` are the layers of
        each; `copies` are those of experts; for `taps` see Setup. `away` start what speaks for the stages but the
        first, where these are on other hosts; none: all are here."""
        assert memory.arena is not None and len(away) in (0, len(stages) - 1)
        whole, ranks = checkpoint.config, config.tp
        self.config = rank_config(config, 0, 0)
        """As rank 0 has it."""
        self.vocab_size = whole.vocab_size
        self.stages, self.alone = len(stages), ranks == 1
        self.taps, self._own_taps = taps, taps_of(taps, stages[0])
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
        here = 1 if away else self.stages
        sums = [*self._share(whole, config, here), *[None] * (self.stages - here)]
        self._group: RankGroup | None = self.shared
        self._lost: RankLost | None = None
        self._directory: Path | None = None
        """Where ranks find each other that add by torch.distributed."""
        self._passing: SharedMemory | None = None
        self.counted: NDArray[np.int64] | None = None
        """See PassedOn; None: there is one stage, or there are no experts."""
        if self.stages > 1:
            room = PassingRoom.of(whole, config, taps)
            arena = self._arena(room.layout)
            self._passing = SharedMemory.of(arena)
            self._states, self._logits, self._features, counted = room.views(arena.slots())
            self.counted = counted if whole.experts is not None else None
            self._places = [*range(room.places)]
            """Free ones."""
        memory.changes = PageChanges() if away or config.copies_pages else None
        self._apart: PagesApart | None = None
        speaking = [ranks, *(1 if away else ranks for _ in stages[1:])]
        """Followers of each stage, rank 0 of all among them."""
        pipes = pipes_between(speaking)
        self._pipes = pipes[0][0]
        self._followers: list[RankFollower] = []
        try:
            for stage, rank in [(stage, rank) for stage, count in enumerate(speaking) for rank in range(count)][1:]:
                tells = 0 if rank or stage + 1 == self.stages else speaking[stage + 1]
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
                    tells,
                    taps,
                )
                starts = away[stage - 1] if away and stage else launch or RankProcess
                self._followers.append(RankFollower(setup, pipes[stage][rank], starts))
        except BaseException:
            for pipe in (pipe for own in pipes for pipe in own):
                pipe.close()
            self.close()
            raise

    def _share(self, model: ModelConfig, config: EngineConfig, stages: int) -> list[SharedMemory | None]:
        """Where the ranks of each stage of this host add what they compute."""
        if not config.kernels or config.tp == 1 or config.device != "cpu":
            return [None] * stages
        room = shared_room(model, config)
        arenas = [self._arena(shared_layout(config.tp, room)) for _ in range(stages)]
        try:
            self.shared = SharedGroup(arenas[0].slots(), 0, self._columns, room)
        except NotBuilt:
            return [None] * stages
        return [SharedMemory.of(arena) for arena in arenas]

    def _arena(self, layout: Layout) -> Arena:
        arena = Arena(layout.offset(1))
        self._arenas.append(arena)
        arena.format(layout)
        return arena

    def _meeting(self, stage: int) -> str:
        if self.shared is not None or self.alone:
            return ""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))
        return str(self._directory / f"meeting-{stage}")

    @property
    def watched(self) -> Sequence[int]:
        """Files that can be read as soon as one of the processes has ended."""
        return [follower.process.watched for follower in self._followers]

    @property
    def leaving(self) -> Sequence[int]:
        """Files that can be read as soon as one of them says that it will end, or has."""
        return [file for follower in self._followers for file in follower.process.leaving]

    @property
    def pids(self) -> Sequence[int]:
        """Of the other ranks."""
        return [follower.process.pid for follower in self._followers]

    def meet(self) -> None:
        """Returns when all ranks have loaded and can compute. Raises RankLost."""
        for follower in self._followers:
            follower.done()
            follower.patience(STEP_S)
        if self._group is None and len(self._columns) > 1:
            self._group = open_group(self._meeting(0), 0, self._columns, self.config)

    def add(self, own: Tensor) -> Tensor:
        """See RankGroup."""
        return own if self._group is None else self._group.add(own)

    def pages_at(self, place: torch.device) -> PageMemory:
        """See RankPlace."""
        self._apart = PagesApart(self.memory, self.checkpoint, place)
        return self._apart.own

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
            changed = self._changed()
            told = self._tell(partial(self._teller.tell, order, compiled, shown=shown, changed=changed), shown)
            self._bring(changed)
            yield RankStep(None, gather, shown)
            group.wait()
            self._take_back(order)
            self._done(told)

    def launch(self, order: Sequence[Rows], first: ComputesPieces) -> Passed:
        """Has a step computed by all stages, in pieces, and returns when the first has. There are as many steps on
        their way as stages at most. Raises as `step`."""
        pieces = [(piece, first.takes(piece), first.rows_shown(piece)) for piece in pieces_of(order, self.stages)]
        row = 0
        with self._together():
            passed = Passed(self._places.pop())
            for piece, compiled, shown in pieces:
                at = PassedAt(passed.place, row, passed.samples, passed.features)
                changed = self._changed()
                message = partial(self._teller.tell, piece, compiled, at=at, shown=shown, changed=changed)
                passed.told.append(self._tell(message, shown))
                self._bring(changed)
                features = first.features(piece)
                states = first.compute_piece(piece, compiled, shown, features)
                if self._group is not None:
                    self._group.wait()
                if features is not None:
                    put_features(self._features, at, self._own_taps, features)
                self._states[0, passed.place, row : row + len(states)].copy_(states)
                self._pipes.tell()
                self._take_back(piece)
                row += len(states)
                passed.samples += sum(run.samples for run in piece)
                passed.features += sum(run.featured_tokens for run in piece)
        return passed

    def logits(self, passed: Passed, features: Features | None) -> Tensor:
        """What the last stage has made of a step, when it has; valid until another is launched. Fills `features`.
        Raises as `step`."""
        with self._together():
            for told in passed.told:
                self._done(told)
        if features is not None:
            features.values.copy_(self._features[passed.place, : passed.features].flatten(1))
        self._places.append(passed.place)
        return self._logits[passed.place, : passed.samples]

    def _changed(self) -> tuple[list[int], list[int]]:
        """Pages that were written, and those that were cleared, since the last call, where somebody has to know."""
        return ([], []) if self.memory.changes is None else self.memory.changes.take()

    def _bring(self, changed: tuple[list[int], list[int]]) -> None:
        if self._apart is not None:
            self._apart.bring(*changed)

    def _take_back(self, order: Sequence[Rows]) -> None:
        if self._apart is not None:
            self._apart.take_back(order)

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
        embeddings = None if shown is None else shown.embeddings.float().cpu().numpy().tobytes()
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
        for follower in self._followers:
            follower.process.kill()
        if self._group is not None:
            self._group.close()

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
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
