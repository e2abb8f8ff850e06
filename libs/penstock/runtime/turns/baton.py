"""The baton: a worker that shares cores computes while it has it, instead of beside others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.runtime.cores import available_cores
from penstock.runtime.turns.order import CoreClaim, Stage, Standing, crowded, may_begin, meet
from penstock.runtime.turns.table import Streams, TableStuck, TurnTable

_LEAST_S, _MOST_S, _TIMES = 0.25, 5.0, 4.0
"""Others wait for a turn four times as long as it should take, but at least and at most so many seconds."""
_LOOK_S = 0.02
"""Who waits looks so often whether those before it are alive."""
_FRESH_S = 0.25
"""So long counts what a worker says of itself: that it waits, and its streams after a turn."""
_REST_S = 1.0
"""Between two looks at whether others are alive when nothing has to be waited for; and without the table after its
lock was stuck."""
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Beside:
    """The streams of other workers on the same cores."""

    streams: int = 0
    step_s: float = 0.0
    """Seconds of one step of each of these workers, together."""


@dataclass(slots=True)
class TurnCounters:
    """Totals of one worker."""

    turns: int = 0
    """Steps that were computed with the baton, beside other workers."""
    waited_s: float = 0.0
    given_up: int = 0
    """Waits that ended because another worker's turn took far too long."""


ALONE = Beside()


class Baton:
    """One worker's hand on the baton. `turn` is for the thread that computes, the rest for any."""

    def __init__(self, directory: Path, claim: CoreClaim) -> None:
        """Raises OSError, as `TurnTable` does."""
        self._table = TurnTable(directory, claim)
        self._mine = Standing(claim)
        self._met: dict[int, CoreClaim] = {}
        """The workers that this one cannot compute beside, by row."""
        self._changes = -1
        self._looked = 0.0
        self._without_until = 0.0
        self._held = False
        self._decodes = False
        self._turn_s = self._began = self._paused = 0.0
        """How long others wait for this turn; when it began, and was last at a place for a pause."""
        self.counters = TurnCounters()

    def close(self) -> None:
        """Leaves the others."""
        self._table.close()

    @contextmanager
    def turn(self, decodes: bool, expected_s: float) -> Iterator[bool]:
        """Waits for the baton, computes, passes it on. `decodes`: the step brings tokens for streams. Yields whether
        there is anybody to pass it on to."""
        self._turn_s, self._decodes = min(_MOST_S, max(_LEAST_S, _TIMES * expected_s)), decodes
        self._held = self._take()
        try:
            yield self._held
        finally:
            self._give()

    def pause(self, slice_s: float) -> None:
        """Within a turn, from time to time: where the turn is for prompts, another worker waits for one with streams,
        and going on as long as since the last time would take it over `slice_s` seconds, that one has its turn now.
        `expected_s` counts from here on."""
        if not self._held:
            return
        now, last = time.monotonic(), self._paused
        self._paused = now
        if self._decodes or 2 * now - last < self._began + slice_s or not self._streams_wait(now):
            self._table.renew(now + self._turn_s)
            return
        self._give()
        self._held = self._take()

    def tell(self, streams: int, step_s: float) -> None:
        """Says how many streams run here, and how long a step of theirs takes."""
        if self._met:
            self._table.tell(Streams(streams, step_s, time.monotonic()))

    def beside(self) -> Beside:
        """The others' streams."""
        if not self._met:
            return ALONE
        now, count, step_s = time.monotonic(), 0, 0.0
        for row, claim in self._met.items():
            told, other = self._table.streams(row), self._table.standing(row, claim)
            busy = other.stage is not Stage.AWAY and now < other.due
            if told.count and (busy or now < told.told + max(_FRESH_S, _TIMES * told.step_s)):
                count += told.count
                step_s += told.step_s
        return Beside(count, step_s)

    def _take(self) -> bool:
        table = self._table
        if table.changes == self._changes and not self._met:
            return False
        began = time.monotonic()
        if began < self._without_until:
            return False
        try:
            with table.locked():
                self._look_around(began)
                if not self._met:
                    return False
                waiting = replace(self._standing(), stage=Stage.WAITING, decodes=self._decodes)
                news = self._try(waiting, began, began)
            while news is not None:
                table.sleep(news, _LOOK_S)
                now = time.monotonic()
                with table.locked():
                    self._clear_dead()
                    news = self._try(replace(waiting, owed=self._standing().owed), began, now)
        except TableStuck:
            self.counters.given_up += 1
            self._without_until = time.monotonic() + _REST_S
            return False
        finally:
            self._began = self._paused = time.monotonic()
            self.counters.waited_s += self._began - began
        self.counters.turns += 1
        return True

    def _try(self, waiting: Standing, began: float, now: float) -> int | None:
        """Begins the turn if it may, else waits on and returns the table's news."""
        table = self._table
        others = {row: table.standing(row, claim) for row, claim in self._met.items()}
        if not may_begin(waiting, others.values(), now):
            table.put(table.row, replace(waiting, due=now + _FRESH_S))
            return table.news
        owed = waiting.owed and not self._decodes
        table.put(table.row, replace(waiting, stage=Stage.COMPUTING, owed=owed, due=now + self._turn_s))
        for row, other in others.items():
            if not self._decodes:
                table.owe(row)
            if other.stage is Stage.COMPUTING and began < other.due <= now:
                self.counters.given_up += 1
        return None

    def _give(self) -> None:
        if not self._held:
            return
        self._held = False
        table = self._table
        try:
            with table.locked():
                table.put(table.row, replace(self._standing(), stage=Stage.AWAY))
                if any(table.standing(row, claim).stage is Stage.WAITING for row, claim in self._met.items()):
                    table.wake()
        except TableStuck:  # others go on when the turn is overdue
            self._without_until = time.monotonic() + _REST_S

    def _streams_wait(self, now: float) -> bool:
        rows = (self._table.standing(row, claim) for row, claim in self._met.items())
        return any(other.stage is Stage.WAITING and other.decodes and now < other.due for other in rows)

    def _standing(self) -> Standing:
        return self._table.standing(self._table.row, self._mine.claim)

    def _look_around(self, now: float) -> None:
        """Learns who came and left."""
        if now > self._looked + _REST_S:
            self._looked = now
            self._clear_dead()
        if self._table.changes != self._changes:
            self._changes = self._table.changes
            mine, rows = self._mine.claim, self._table.rows()
            met = {row: claim for row, claim in rows.items() if row != self._table.row and meet(mine, claim)}
            self._met = met if crowded([mine, *met.values()]) else {}

    def _clear_dead(self) -> None:
        for row in self._met:
            self._table.clear_dead(row)


def shared_directory() -> Path:
    """Where the workers of this host and user agree."""
    return Path(f"/dev/shm/penstock-{os.geteuid()}")


def own_claim(threads: int) -> CoreClaim:
    """What this process computes with; `threads` 0: one for each core."""
    affinity, cores = os.sched_getaffinity(0), available_cores()
    group = _CGROUP.stat().st_ino if cores < len(affinity) else 0
    return CoreClaim(sum(1 << core for core in affinity if core < 1024), threads or cores, group, cores if group else 0)
