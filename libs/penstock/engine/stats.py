"""The engine's statistics."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.engine.fit import PromptFit, StepFit
from penstock.kv.cost import PrefillCost
from penstock.runtime.drafts import DraftAccount
from penstock.runtime.request_metrics import STEP_TOKENS
from penstock.runtime.token_metrics import TokenBuckets
from penstock.runtime.turns.baton import TurnCounters

if TYPE_CHECKING:
    from penstock.engine.models.packed import PackedWeights
    from penstock.engine.scheduling.scheduler import SchedulerStats
    from penstock.engine.step.run import Run

_WEIGHT = 0.2
"""Weight of the newest measurement in the moving averages."""
_MIXED, _RARE_WEIGHT = 16, 0.6
"""While prompts queue, streams run alone in one step after so many with prompts, as what they cost changes when more of
them run; the weight of such a step."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Statistics of one engine since its start."""

    running: int
    """Requests that yield not included, nor among those that wait, nor in the tokens."""
    waiting: int
    yielding: int
    """Requests that yield, wherever they are."""
    loading: int
    """Requests whose source is still working, including dropped requests."""
    queued_tokens: int
    """Known tokens of waiting and running sequences whose KV steps have still to compute or to copy: those of a block
    that several wait for once, those in pages that are shared and decode rows not at all."""
    free_pages: int
    roomy_pages: int
    """Those, and pages that requests which yield would give back, about."""
    total_pages: int
    resident_pages: int
    """Pages that hold a block under its key, whether a request uses it or not."""
    shared_pages: int
    """Pages that more than one request or sink holds."""
    copied_tokens: int
    """Tokens whose KV was copied from a page of another request, as their block was not there as a whole."""
    prefill_tokens_per_s: float
    """Moving average; 0 until measured."""
    decode_step_s: float
    """Moving average over steps without prefill; 0 until measured."""
    step_cost: tuple[float, float, float]
    """Seconds of such a step: however little there is to do, for each sequence, and for each token of their context; 0
    until measured."""
    prompt_cost: tuple[float, float]
    """Seconds of a prompt's token, and for each token of the context before it; 0 until measured."""
    in_step_s: float
    """How long the step in progress has been computed; 0 between steps."""
    expected_s: float
    """How long it should take in all; 0 while that is not known, or while it waits for its turn."""
    resting: bool
    """The loop of steps waits for something to do."""
    steps: int
    computed_tokens: int
    """Rows that went through the model, drafts included."""
    generated_tokens: int
    preemptions: int
    drafts: DraftAccount
    """By proposer."""
    draft_failures: int
    """Times that a step waited for the drafter in vain."""
    lookup_defects: int
    """Texts that the lookup could not take in."""
    load_failures: int
    """Number of loads that raised, so that the whole prompt was computed."""
    sink_failures: int
    failed_steps: int
    """Sequences for which a step failed, alone."""
    turns: TurnCounters
    """How steps got the cores that other workers share."""
    weights_bytes: int
    """Bytes of packed matrices; 0 when torch holds the weights."""
    weights_shared: bool
    """Whether they lie in a mapped file, whose memory all processes that map it share."""
    peak_bytes: int
    """Peak memory of this process, shared memory included."""
    busy_s: float
    """Seconds in which steps were computed, waiting for a turn not included."""
    step_tokens: TokenBuckets
    """Tokens of each step: of prompts, and generated. It goes on counting."""

    @property
    def drafted(self) -> int:
        """Drafts that were verified."""
        return self.drafts.drafted

    @property
    def accepted(self) -> int:
        """Those of them that were right."""
        return self.drafts.accepted


@dataclass(slots=True)
class Counters:
    """The engine's running totals and averages."""

    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    fit: StepFit = field(default_factory=StepFit)
    prompts: PromptFit = field(default_factory=PromptFit)
    steps: int = 0
    busy_s: float = 0.0
    step_tokens: TokenBuckets = field(default_factory=lambda: TokenBuckets(STEP_TOKENS))
    computed_tokens: int = 0
    drafts: DraftAccount = field(default_factory=DraftAccount)
    """Of all sequences."""
    draft_failures: int = 0
    load_failures: int = 0
    sink_failures: int = 0
    failed_steps: int = 0
    mixed: int = 0
    """Steps with streams and prompts since the last one without prompts."""
    step_began: float | None = None
    """When the running step began, on the monotonic clock; None between steps."""
    expected_s: float = 0.0
    step_ended: float = 0.0
    """When the last step ended, on the monotonic clock."""
    resting: bool = False
    """As in the statistics."""

    @property
    def in_step_s(self) -> float:
        """How long the step in progress has been computed; 0 between steps."""
        began = self.step_began  # once: the thread of steps goes on meanwhile
        return 0.0 if began is None else time.monotonic() - began

    def begin(self, expected_s: float = 0.0) -> None:
        """A step begins now; 0: nobody knows how long it takes. Callable from any thread."""
        self.step_began, self.expected_s = time.monotonic(), expected_s

    def end(self, now: float) -> None:
        """A step has ended `now`."""
        self.step_ended, self.step_began, self.expected_s = now, None, 0.0

    def looked(self, began: float, now: float, *, waited_s: float, between: bool) -> None:
        """Pictures were computed from `began` until `now`, but for the wait for a turn, which is no part of a step;
        `between`: nor is one begun."""
        self.busy_s += now - began - waited_s
        if between:
            self.end(now)
        else:
            self.step_ended = now

    def predict(self, runs: Sequence[Run], width: int) -> float:
        """Seconds that a step of these runs should take in a model of that width; 0 before the like was measured."""
        prompts = [run for run in runs if run.known > 1]
        streams = len(runs) - len(prompts)
        if (prompts and not self.prefill_tokens_per_s) or (streams and not self.decode_step_s):
            return 0.0
        seconds = 0.0
        if prompts:
            cost = PrefillCost.of_model(width, self.prefill_tokens_per_s)
            seconds += sum(cost.seconds(run.start, run.tokens) for run in prompts)
        if streams:
            base_s, sequence_s, token_s = self.fit.coefficients
            context = sum(run.end for run in runs if run.known == 1)
            seconds += max(self.decode_step_s, base_s + sequence_s * streams + token_s * context)
        return seconds

    @property
    def stale(self) -> bool:
        """Whether the next step should show what streams cost alone."""
        return self.mixed >= _MIXED

    def step(
        self, seconds: float, prefill_rows: int, rows: int, runs: Sequence[Run] = (), *, aside: bool = False
    ) -> None:
        """One step took `seconds` for `rows` rows, `prefill_rows` of them of prompts; `runs` are all of its rows.
        `aside`: only requests that yield took part, whose batch says nothing of what the next stream finds."""
        self.steps += 1
        self.busy_s += seconds
        self.computed_tokens += rows
        if not prefill_rows:
            if not aside:
                weight = _RARE_WEIGHT if self.stale else _WEIGHT
                self.decode_step_s = _average(self.decode_step_s, seconds, weight)
                self.mixed = 0
            if runs:
                self.fit.learn(seconds, len(runs), sum(run.end for run in runs))
            return
        # Chunks of those that yield are short, and take longer for each token; so do rows of pictures, by torch.
        if (aside or any(run.shows for run in runs)) and self.prefill_tokens_per_s:
            return
        self.mixed += rows > prefill_rows
        own = seconds if prefill_rows == rows else max(seconds - self.decode_step_s, seconds / 10)
        self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, prefill_rows / max(own, 1e-9))
        portions = [(run.start, run.tokens) for run in runs if run.known > 1]
        if portions:
            self.prompts.learn(own, portions)


def collect(
    lines: SchedulerStats,
    counters: Counters,
    loading: int,
    packed: PackedWeights | None,
    *,
    turns: TurnCounters,
    lookup_defects: int,
) -> EngineStats:
    """The present statistics; `loading` counts loads that have not ended."""
    return EngineStats(
        running=lines.running,
        waiting=lines.waiting,
        yielding=lines.yielding,
        loading=loading,
        queued_tokens=lines.queued_tokens,
        free_pages=lines.free_pages,
        roomy_pages=lines.roomy_pages,
        total_pages=lines.total_pages,
        resident_pages=lines.resident_pages,
        shared_pages=lines.shared_pages,
        copied_tokens=lines.copied_tokens,
        prefill_tokens_per_s=counters.prefill_tokens_per_s,
        decode_step_s=counters.decode_step_s,
        step_cost=counters.fit.coefficients,
        prompt_cost=counters.prompts.coefficients,
        in_step_s=counters.in_step_s,
        expected_s=counters.expected_s if counters.step_began is not None else 0.0,
        resting=counters.resting,
        steps=counters.steps,
        computed_tokens=counters.computed_tokens,
        generated_tokens=lines.generated_tokens,
        preemptions=lines.preemptions,
        drafts=counters.drafts.copy(),
        draft_failures=counters.draft_failures,
        lookup_defects=lookup_defects,
        load_failures=counters.load_failures,
        sink_failures=counters.sink_failures,
        failed_steps=counters.failed_steps,
        turns=replace(turns),
        weights_bytes=0 if packed is None else packed.nbytes,
        weights_shared=packed is not None and packed.shared,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        busy_s=counters.busy_s,
        step_tokens=counters.step_tokens,
    )


def _average(old: float, new: float, weight: float = _WEIGHT) -> float:
    return new if old == 0.0 else old + weight * (new - old)
