"""What metrics count of a request that has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import inf
from typing import Literal

from penstock.gateway.completing.account import TriedPlan
from penstock.gateway.completing.completion import Completion
from penstock.gateway.completing.usage import Usage
from penstock.gateway.request.ask import Urgency
from penstock.runtime.metrics import ModelMetrics
from penstock.runtime.request_metrics import Ended, EndedRequest


def count(completion: Completion, usage: Usage, metrics: ModelMetrics) -> None:
    """Counts a request, once."""
    ask, longest = completion.ask, max(choice.answer.tokens for choice in completion.choices)
    metrics.requests.count(
        EndedRequest(
            ended=ended(completion),
            prompt_tokens=usage.prompt_tokens,
            sources={**usage.cached, "computed": usage.computed_tokens},
            generated_tokens=usage.completion_tokens,
            longest=longest,
            choices=ask.n,
            max_tokens=ask.sampling.max_tokens,
            times=usage.times,
            live=not completion.caller.yields,
        )
    )
    _count_again(usage, metrics)
    _count_drafts(usage, metrics)
    metrics.replans.inc(completion.replans)
    for choice in completion.choices:
        _count_moves(choice.flow.account.attempts, metrics)
    outcome = None if completion.caller.yields else judged(ask.urgency, usage.times, longest)
    if outcome is not None:
        metrics.targets[outcome].inc()


def ended(completion: Completion) -> Ended:
    """How a request ended."""
    finishes = [choice.finish for choice in completion.choices]
    if completion.given_up or not (completion.outbox.error or all(finishes)):
        return "abort"
    if completion.outbox.error:
        return "error"
    return "length" if "length" in finishes else "stop"


def judged(urgency: Urgency, times: Mapping[str, float], tokens: int) -> Literal["met", "late", "slow"] | None:
    """Compares a request, whose longest answer has so many tokens, with what its client wanted; None: it wanted
    nothing, or there is no token."""
    if not tokens or urgency.ttft_s == urgency.itl_s == inf:
        return None
    if times["first_token"] > urgency.ttft_s:
        return "late"
    return "slow" if times["handoff"] + times["decode"] > urgency.itl_s * (tokens - 1) else "met"


def _count_again(usage: Usage, metrics: ModelMetrics) -> None:
    for source, tokens in usage.again.items():
        metrics.again(source).inc(tokens)
    metrics.told_again.inc(usage.told_again)
    metrics.recalled.inc(usage.recalled_tokens)


def _count_drafts(usage: Usage, metrics: ModelMetrics) -> None:
    metrics.draft_passes.inc(usage.drafts.passes)
    metrics.drafted.inc(usage.drafts.drafted)
    metrics.accepted.inc(usage.drafts.accepted)
    for place, tokens in enumerate(usage.drafts.right_at):
        metrics.accepted_at(place).inc(tokens)


def _count_moves(attempts: Sequence[TriedPlan], metrics: ModelMetrics) -> None:
    for trial, following in zip_longest(attempts, attempts[1:]):
        if trial.lost is None:
            continue
        metrics.lost(trial.lost.stage, "silent" if trial.lost.silent else trial.lost.reason).inc()
        if following is not None:
            metrics.moving.observe(following.planned_at - trial.lost_at)
