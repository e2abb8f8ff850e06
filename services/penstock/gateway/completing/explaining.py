"""Why a request went where it went, on its client's wish: the header `x-penstock-explain: plan` asks for a header
`x-penstock-plan` of the response. It says what the router expected of this request's own plans, and names workers, not
where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from penstock.errors import InvalidRequest
from penstock.gateway.completing.completion import Completion
from penstock.gateway.request.work import Assignment

ASKED, ANSWER = "x-penstock-explain", "x-penstock-plan"
_MOST = 4
"""Choices whose plans are told: a header has to stay short."""


def wants_plan(headers: Mapping[str, str]) -> bool:
    """Whether the client asks for the reasons of its plan. Raises InvalidRequest."""
    asked = headers.get(ASKED)
    if asked not in (None, "plan"):
        raise InvalidRequest(f"{ASKED}: must be plan, not {asked[:40]!r}", field=ASKED)
    return asked is not None


def explanation(completion: Completion) -> str:
    """The latest plan of each of the first choices, as JSON in ASCII: workers, seconds by part, and tokens by where
    their KV was expected to come from."""
    plans = []
    for number, choice in enumerate(completion.choices[:_MOST]):
        attempts = choice.flow.account.attempts
        if attempts:
            plans.append({"choice": number, "plan": len(attempts), **_plan(attempts[-1].chosen)})
    return msgspec.json.encode(plans).decode().encode("ascii", "backslashreplace").decode()


def _plan(chosen: Assignment) -> dict[str, Any]:
    found: dict[str, Any] = {"decode": chosen.decode.member}
    if chosen.prefill is not None:
        found["prefill"] = chosen.prefill.member
    if chosen.site:
        found["site"] = chosen.site
    reasons = asdict(chosen.reasons) if chosen.reasons else {}
    return found | {name: round(said, 6) if isinstance(said, float) else said for name, said in reasons.items()}
