"""How the disk is doing: what may still be written, whether it fails, and what went in and out, over all spaces.

When it fails, reading or writing stops for a while, the log says so once, and the store goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from penstock.kvstore.tiers.disk.budget import WriteBudget
from penstock.kvstore.tiers.disk.format import Drop
from penstock.kvstore.tiers.disk.health import Health
from penstock.kvstore.tiers.disk.stats import NvmeStats, Traffic


class Condition:
    """Of one disk, as long as the store lives."""

    def __init__(self, budget: WriteBudget, now: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        """`wall` is the time since 1970, by which days are counted."""
        self.budget = budget
        self.traffic = Traffic()
        self._now, self._wall = now, wall
        self._reads, self._writes = Health(), Health()
        self._log = structlog.get_logger("penstock.kvstore.nvme")

    # -- reading

    @property
    def readable(self) -> bool:
        """Whether to read; not for a while after a failure."""
        return self._reads.usable(self._now())

    def reading_failed(self, reason: str) -> None:
        """Suspends reading for a while."""
        self._failed("reading", self._reads, reason)

    def reading_worked(self) -> None:
        """Ends a suspension."""
        self._worked("reading", self._reads)

    # -- writing

    @property
    def writable(self) -> bool:
        """Whether to write; not for a while after a failure."""
        return self._writes.usable(self._now())

    def writes_wait_s(self, size: int) -> float:
        """0: `size` bytes may be written now. Else for how long not."""
        now = self._now()
        if not self._writes.usable(now):
            return self._writes.until - now
        return self.budget.wait_s(size, now, self._wall())

    def written(self, size: int) -> None:
        """Charges the budget for bytes that were written."""
        self.budget.spend(size, self._wall())

    def writing_failed(self, reason: str) -> None:
        """Suspends writing for a while."""
        self._failed("writing", self._writes, reason)

    def writing_worked(self) -> None:
        """Ends a suspension."""
        self._worked("writing", self._writes)

    # -- figures

    def _failed(self, what: str, health: Health, reason: str) -> None:
        if health.failed(reason, self._now()):
            self._log.warning(f"the disk tier stops {what} for a while", reason=reason)

    def _worked(self, what: str, health: Health) -> None:
        if health.worked():
            self._log.info(f"the disk tier is {what} again")

    def stats(self) -> NvmeStats:
        """A consistent snapshot; zeros for what only an open space has."""
        traffic = self.traffic
        return NvmeStats(
            read_blocks=traffic.blocks_read,
            read_bytes=traffic.bytes_read,
            written_blocks=traffic.blocks_written,
            written_bytes=traffic.bytes_written,
            **{drop.value: traffic.dropped[drop] for drop in Drop},
            read_failures=self._reads.failures,
            write_failures=self._writes.failures,
            written_today=self.budget.spent,
            refused=traffic.refused,
            prefetched=traffic.prefetched,
        )
