"""Whether a worker of one role is better used in the other: state in, at most one flip out. No clock, no await.

Pressure is 1 where a role has as much as it can take: prompts that wait for `hold_s` seconds, after which the router
holds further ones back, or batches that are full. A worker changes its role when the other role has had more than 0.8
for `dwell_s` seconds, while its own would have less than 0.4 without the worker. The two thresholds lie apart, and
after a flip nothing flips for `dwell_s` again: a load that alternates faster than that moves nobody. The last worker of
a role stays.

DistServe (OSDI 2024, section 4.3) plans such a split anew for each change of load; here single workers change sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from penstock.router.workers import Role, WorkerState

_HIGH, _LOW = 0.8, 0.4


@dataclass(frozen=True, slots=True)
class BalanceKnobs:
    """The limits of one balancer."""

    hold_s: float
    """Seconds of prompts before a new one that are as much as a prefill worker should have."""
    dwell_s: float
    """For so long loads have to diverge before a worker flips, and none flips after that."""


@dataclass(frozen=True, slots=True)
class Flip:
    """A worker is to take another role."""

    worker: str
    role: Role


@dataclass(frozen=True, slots=True)
class Leaning:
    """What is remembered of one model between two looks."""

    short: Role | None = None
    """The role that has had too much since `since`."""
    since: float = inf
    flipped_at: float = -inf


@dataclass(frozen=True, slots=True)
class Pressure:
    """The mean over the workers of each role."""

    prefill: float
    decode: float


def prefill_load(worker: WorkerState, hold_s: float) -> float:
    """The pressure that prompts are to one worker: 1 for `hold_s` seconds of them."""
    return worker.queued_tokens / max(worker.prefill_rate, 1.0) / hold_s


def decode_load(worker: WorkerState) -> float:
    """The pressure that answers are to one worker: 1 when its batch or its memory is full."""
    return max(worker.sequences / worker.max_running, worker.context_tokens / worker.kv_capacity_tokens)


def pressure(workers: Sequence[WorkerState], hold_s: float) -> Pressure:
    """Of the workers of one model, those of both roles left out."""
    prompts = [prefill_load(one, hold_s) for one in workers if one.role is Role.PREFILL]
    answers = [decode_load(one) for one in workers if one.role is Role.DECODE]
    return Pressure(sum(prompts) / max(1, len(prompts)), sum(answers) / max(1, len(answers)))


def balance(
    workers: Sequence[WorkerState], leaning: Leaning, now: float, knobs: BalanceKnobs
) -> tuple[Flip | None, Leaning]:
    """What to do for one model, whose `workers` may get work, and what to remember until the next look."""
    short = _short(workers, pressure(workers, knobs.hold_s))
    if short is not leaning.short:
        leaning = replace(leaning, short=short, since=now)
    if short is None or now - max(leaning.since, leaning.flipped_at) < knobs.dwell_s:
        return None, leaning
    giving = [one for one in workers if one.role is not short and one.role is not Role.BOTH]
    least = min(giving, key=lambda one: (_own(one, knobs.hold_s), one.id))
    return Flip(least.id, short), Leaning(flipped_at=now)


def _own(worker: WorkerState, hold_s: float) -> float:
    return prefill_load(worker, hold_s) if worker.role is Role.PREFILL else decode_load(worker)


def _short(workers: Sequence[WorkerState], now: Pressure) -> Role | None:
    """The role that has too much, when a worker of the other one can be spared."""
    prefill, decode = (sum(one.role is role for one in workers) for role in (Role.PREFILL, Role.DECODE))
    if prefill and decode > 1 and now.prefill > _HIGH and now.decode * decode / (decode - 1) < _LOW:
        return Role.PREFILL
    if decode and prefill > 1 and now.decode > _HIGH and now.prefill * prefill / (prefill - 1) < _LOW:
        return Role.DECODE
    return None
