"""The engine's statistics."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.engine.models.packed import PackedWeights
    from penstock.engine.scheduling.scheduler import SchedulerStats

_WEIGHT = 0.2
"""Weight of the newest measurement in the moving averages."""
_MIXED, _RARE_WEIGHT = 16, 0.6
"""While prompts queue, streams run alone in one step after so many with prompts, as what they cost changes when more of
them run; the weight of such a step."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Statistics of one engine since its start."""

    running: int
    waiting: int
    loading: int
    """Requests whose source is still working, including dropped requests."""
    queued_tokens: int
    """Known tokens of waiting and running sequences whose KV steps have still to compute: those of a block that several
    wait for once, those in pages and decode rows not at all."""
    free_pages: int
    total_pages: int
    resident_pages: int
    """Pages that hold a block under its key, whether a request uses it or not."""
    shared_pages: int
    """Pages that more than one request or sink holds."""
    prefill_tokens_per_s: float
    """Moving average; 0 until measured."""
    decode_step_s: float
    """Moving average over steps without prefill; 0 until measured."""
    in_step_s: float
    """How long the step in progress has been computed; 0 between steps."""
    steps: int
    computed_tokens: int
    """Rows that went through the model, drafts included."""
    generated_tokens: int
    preemptions: int
    drafted: int
    accepted: int
    draft_failures: int
    """Times the drafter was late or failed."""
    load_failures: int
    """Number of loads that raised, so that the whole prompt was computed."""
    sink_failures: int
    failed_steps: int
    """Sequences for which a step failed, alone."""
    weights_bytes: int
    """Bytes of packed matrices; 0 when torch holds the weights."""
    weights_shared: bool
    """Whether they lie in a mapped file, whose memory all processes that map it share."""
    peak_bytes: int
    """Peak memory of this process, shared memory included."""


@dataclass(slots=True)
class Counters:
    """The engine's running totals and averages."""

    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    steps: int = 0
    computed_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_failures: int = 0
    load_failures: int = 0
    sink_failures: int = 0
    failed_steps: int = 0
    mixed: int = 0
    """Steps with streams and prompts since the last one without prompts."""
    step_began: float | None = None
    """When the running step began, on the monotonic clock; None between steps."""

    @property
    def in_step_s(self) -> float:
        """How long the step in progress has been computed; 0 between steps."""
        return 0.0 if self.step_began is None else time.monotonic() - self.step_began

    @property
    def stale(self) -> bool:
        """Whether the next step should show what streams cost alone."""
        return self.mixed >= _MIXED

    def step(self, seconds: float, prefill_rows: int, rows: int) -> None:
        """One step took `seconds` for `rows` rows, `prefill_rows` of them of prompts."""
        self.steps += 1
        self.computed_tokens += rows
        if not prefill_rows:
            self.decode_step_s = _average(self.decode_step_s, seconds, _RARE_WEIGHT if self.stale else _WEIGHT)
            self.mixed = 0
            return
        self.mixed += rows > prefill_rows
        own = seconds if prefill_rows == rows else max(seconds - self.decode_step_s, seconds / 10)
        self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, prefill_rows / max(own, 1e-9))


def collect(lines: SchedulerStats, counters: Counters, loading: int, packed: PackedWeights | None) -> EngineStats:
    """The present statistics; `loading` counts loads that have not ended."""
    return EngineStats(
        running=lines.running,
        waiting=lines.waiting,
        loading=loading,
        queued_tokens=lines.queued_tokens,
        free_pages=lines.free_pages,
        total_pages=lines.total_pages,
        resident_pages=lines.resident_pages,
        shared_pages=lines.shared_pages,
        prefill_tokens_per_s=counters.prefill_tokens_per_s,
        decode_step_s=counters.decode_step_s,
        in_step_s=counters.in_step_s,
        steps=counters.steps,
        computed_tokens=counters.computed_tokens,
        generated_tokens=lines.generated_tokens,
        preemptions=lines.preemptions,
        drafted=counters.drafted,
        accepted=counters.accepted,
        draft_failures=counters.draft_failures,
        load_failures=counters.load_failures,
        sink_failures=counters.sink_failures,
        failed_steps=counters.failed_steps,
        weights_bytes=0 if packed is None else packed.nbytes,
        weights_shared=packed is not None and packed.shared,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _average(old: float, new: float, weight: float = _WEIGHT) -> float:
    return new if old == 0.0 else old + weight * (new - old)
