"""Makes rates of counts: what has come since the last look, and how much of it a request brings."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cli.scale.state import MeshNow, MeshSeen

_HALF_LIFE_S, _HALF_LIFE = 60.0, 200.0
"""Of what is believed of the length of prompts and answers, in seconds and in requests, whichever is sooner: what many
have said since counts for more than what was."""
_ENOUGH = 3.0
"""Requests that say something of the length of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCounts(MeshNow):
    """One reading of a mesh. Counts only grow; what members had that have gone is kept."""

    arrived: float
    """Requests."""
    computed_tokens: float
    """Of prompts."""
    answer_tokens: float
    """Generated."""
    queued_tokens: float
    """Of prompts, at workers."""
    held: float
    """Requests that the router holds back."""


class _Length:
    """Tokens of a request, in the mean of late ones; of the last ones while there are too few."""

    def __init__(self) -> None:
        self._tokens = self._requests = 0.0
        self.mean = 0.0
        """0: nothing was seen."""

    def add(self, tokens: float, requests: float, seconds: float) -> None:
        """So many were seen within so many seconds; a request's tokens may be seen a little before it or after it."""
        kept = 0.5 ** max(seconds / _HALF_LIFE_S, requests / _HALF_LIFE)
        self._tokens = self._tokens * kept + max(0.0, tokens)
        self._requests = self._requests * kept + max(0.0, requests)
        if self._requests >= _ENOUGH or (not self.mean and self._requests > 0):
            self.mean = self._tokens / self._requests


class LoadMeter:
    """Owner of the last reading."""

    def __init__(self) -> None:
        self._last: MeshCounts | None = None
        self._prompt, self._answer = _Length(), _Length()

    def look(self, now: MeshCounts) -> MeshSeen | None:
        """What has come since the last reading; None at the first."""
        last, self._last = self._last, now
        seconds = 0.0 if last is None else now.at - last.at
        if last is None or seconds <= 0:
            return None
        arrived = _more(now.arrived, last.arrived)
        placed = now.computed_tokens - last.computed_tokens + now.queued_tokens - last.queued_tokens
        self._prompt.add(placed, arrived - (now.held - last.held), seconds)
        self._answer.add(now.answer_tokens - last.answer_tokens, arrived, seconds)
        came = placed + (now.held - last.held) * self._prompt.mean
        return MeshSeen(
            at=now.at,
            requests_per_s=arrived / seconds,
            prompt_tokens_per_s=max(0.0, came) / seconds,
            answer_tokens_per_s=arrived * self._answer.mean / seconds,
            backlog_tokens=now.queued_tokens + now.held * self._prompt.mean,
            sequences=now.sequences,
            kv_used=now.kv_used,
            pace=now.pace,
            workers=now.workers,
            starting=now.starting,
            judged=now.judged,
            ttft_met=now.ttft_met,
            itl_met=now.itl_met,
            can_add=now.can_add,
        )


def _more(now: float, before: float) -> float:
    """What a count has grown by: one of requests that come is taken from several sources, and may seem to shrink."""
    return max(0.0, now - before)
