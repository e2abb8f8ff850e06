"""What became of a request: its plans with their reasons, what came from where, and when. For its own client: workers
are named, but not where they are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.gateway.completing.account import TriedPlan
from penstock.gateway.completing.completion import Completion, Speaker
from penstock.gateway.completing.usage import Usage
from penstock.gateway.request.work import Placement

Json = dict[str, Any]


def chronicle(completion: Completion, usage: Usage) -> Json:
    """The record of a request that has ended. All times are seconds, those called `at` since its first byte."""
    ask, caller, error = completion.ask, completion.caller, completion.outbox.error
    began = caller.began
    return {
        "object": "request",
        "id": completion.id,
        "request_id": caller.request_id,
        "tenant": caller.tenant,
        "model": ask.model,
        "created": completion.created,
        "stream": ask.stream,
        "status": "failed" if error else "completed" if all(one.finish for one in completion.choices) else "left",
        "error": None if error is None else {"type": error.kind, "code": error.code, "message": error.message},
        "tokens": {
            "prompt": usage.prompt_tokens,
            "computed": usage.computed_tokens,
            "cached": usage.cached,
            "completion": usage.completion_tokens,
            "reasoning": usage.reasoning_tokens,
            "recalled": usage.recalled_tokens,
            "drafted": usage.drafts.drafted,
            "accepted": usage.drafts.accepted,
        },
        "seed": usage.seed,
        "system_fingerprint": usage.fingerprint,
        "replans": completion.replans,
        "times": {name: round(seconds, 6) for name, seconds in usage.times.items()},
        "timeline": _timeline(completion, usage),
        "choices": [_choice(number, one, began) for number, one in enumerate(completion.choices)],
    }


def _timeline(completion: Completion, usage: Usage) -> list[Json]:
    marks = completion.marks()
    found = [("body", marks.body), ("first_token", marks.first), ("last_token", marks.last)]
    for number, choice in enumerate(completion.choices):
        if number == completion.first_choice:
            found += _steps(choice, completion.caller.began)
    found.append(("end", usage.times["total"]))
    happened = sorted(((at, what) for what, at in found if at is not None))
    return [{"at": round(at, 6), "what": what} for at, what in happened]


def _steps(choice: Speaker, began: float) -> list[tuple[str, float | None]]:
    steps: list[tuple[str, float | None]] = []
    for number, trial in enumerate(choice.flow.account.attempts, 1):
        steps.append((f"plan {number} asked", trial.asked_at - began))
        steps.append((f"plan {number} made", trial.planned_at - began))
        if trial.lost is not None:
            steps.append((f"plan {number} lost", trial.lost_at - began))
    return steps


def _choice(number: int, choice: Speaker, began: float) -> Json:
    account = choice.flow.account
    return {
        "index": number,
        "finish_reason": choice.finish or None,
        "prompt_tokens": len(choice.prompt.ids),
        "completion_tokens": choice.answer.tokens,
        "cached": dict(account.use.cached) if account.use else None,
        "replans": account.replans,
        "attempts": [_attempt(trial, began) for trial in account.attempts],
    }


def _attempt(trial: TriedPlan, began: float) -> Json:
    chosen, lost = trial.chosen, trial.lost
    return {
        "at": round(trial.planned_at - began, 6),
        "tokens_before": trial.start,
        "plan": chosen.plan,
        **({"site": chosen.site} if chosen.site else {}),
        "prefill": None if chosen.prefill is None else _place(chosen.prefill),
        "decode": _place(chosen.decode),
        "reasons": None if chosen.reasons is None else asdict(chosen.reasons),
        "lost": None
        if lost is None
        else {
            "at": round(trial.lost_at - began, 6),
            "stage": lost.stage,
            "worker": lost.member or None,
            "silent": lost.silent,
            "type": lost.error.kind,
            "message": lost.error.message,
        },
    }


def _place(place: Placement) -> Json:
    return {"worker": place.member, "other_stores": len(place.sources)}
