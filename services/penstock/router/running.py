"""Requests that run by the plan of a router that has gone."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.router.ledger import Charge


@dataclass(frozen=True, slots=True)
class RunningPlan:
    """The members that serve a request."""

    prefill: str
    """Empty: nobody computes its prompt any more."""
    decode: str
    plan: str = ""
    """What the other router called it."""


def kept_charge(
    kept: RunningPlan, *, prompt_tokens: int, generated: int, expected: int, block_size: int, now: float
) -> Charge:
    """Its charge here, in full: nothing is known of what it shares with others. `expected` tokens of the whole answer,
    of which `generated` exist: then its prompt is computed."""
    return Charge(
        prefill=kept.prefill,
        decode=kept.decode,
        own_tokens=0 if generated else prompt_tokens,
        context_tokens=prompt_tokens + expected,
        prompt_tokens=prompt_tokens,
        generated=generated,
        made_at=now,
        block_size=block_size,
    )
