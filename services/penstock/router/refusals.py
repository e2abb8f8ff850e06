"""What is said to requests that are not placed."""

from __future__ import annotations

from typing import Literal, NoReturn

from penstock.errors import NotFound, Overloaded, TooLarge, Unavailable
from penstock.router.demand import Demand
from penstock.router.options import Answer, NoWorker, QueueFull, TooLong, Unmet
from penstock.router.plans import PlanAsk
from penstock.router.registry import Registry


def refuse(ask: PlanAsk, asked: Demand, answer: Answer, max_queue_s: float) -> NoReturn:
    """Raises what says why the policy has not placed a request: TooLarge, Overloaded or Unavailable."""
    match answer:
        case TooLong(limit):
            raise TooLarge(
                f"{asked.prompt_tokens} tokens and an answer do not fit into the {limit} that a worker holds",
                field="messages",
                code="context_length_exceeded",
            )
        case QueueFull(wait_s):
            raise queue_full(wait_s, max_queue_s)
        case Unmet(target, best_s):
            raise unmet(ask, target, best_s)
        case _:
            assert isinstance(answer, NoWorker)
            raise Unavailable(f"no worker decodes {ask.model!r} now", retry_after=1.0)


def refuse_without_seats(registry: Registry, model: str) -> NoReturn:
    """Raises what says why no worker of `model` may get work: NotFound or Unavailable."""
    if model in registry.adapted() or any(seat.member.model == model for seat in registry):
        raise Unavailable(f"every worker of {model!r} is silent or draining", retry_after=1.0)
    if any(seat.member.role is not None for seat in registry):
        raise NotFound(f"the model {model!r} is not served here", field="model", code="model_not_found")
    raise Unavailable("no worker has joined", retry_after=1.0)


def queue_full(wait_s: float, most_s: float) -> Overloaded:
    """The refusal of a request that would wait for `wait_s`."""
    return Overloaded(f"the queue is {wait_s:.0f} s long", code="queue_full", retry_after=wait_s - most_s + 1)


def unmet(ask: PlanAsk, target: Literal["first_token", "token"], best_s: float) -> Overloaded:
    """The refusal of a request whose target is not met; `best_s` is predicted."""
    field, wanted, what = (
        ("penstock.slo.ttft", ask.first_token_s, "the first token comes")
        if target == "first_token"
        else ("penstock.slo.itl", ask.token_s, "tokens come")
    )
    return Overloaded(
        f"{field}: {what} {'after' if target == 'first_token' else 'every'} {best_s:.3g} s now, as predicted, which is"
        f" more than the {wanted:.3g} s asked for",
        field=field,
        code="slo_unmet",
        retry_after=max(1.0, min(60.0, best_s - wanted)),
    )
