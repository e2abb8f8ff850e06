"""Makes rates of counts: what has come since the last look, and how much of it a request brings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from penstock.cli.scale.state import MeshNow, MeshSeen

_HALF_LIFE_S, _HALF_LIFE = 60.0, 200.0
"""Of what is believed of the length of prompts and answers, in seconds and in requests, whichever is sooner: what many
have said since counts for more than what was."""
_ENOUGH = 3.0
"""Requests, or steps, that say something of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCounts(MeshNow):
    """One reading of a mesh. Counts only grow; what members had that have gone is kept."""

    arrived: float
    """Requests."""
    begun: float
    """Those of them whose prompt was computed."""
    computed_tokens: float
    """Of prompts."""
    answer_tokens: float
    """Generated."""
    accepted_tokens: float
    """Those of them that were drafts."""
    queued_tokens: float
    """Of prompts, at workers."""
    held: float
    """Requests that the router holds back."""


class _TokensOfEach:
    """Tokens of a request, or of a sequence's step, in the mean of late ones; of the last ones while there are too
    few."""

    def __init__(self, half_life: float = inf) -> None:
        """`half_life`: in requests or steps, if they come sooner than that in seconds."""
        self._half_life = half_life
        self._tokens = self._count = 0.0
        self.mean = 0.0
        """0: nothing was seen."""

    def add(self, tokens: float, count: float, seconds: float) -> None:
        """So many were seen within so many seconds; a request's tokens may be seen a little before it or after it."""
        kept = 0.5 ** max(seconds / _HALF_LIFE_S, count / self._half_life)
        self._tokens = self._tokens * kept + max(0.0, tokens)
        self._count = self._count * kept + max(0.0, count)
        if self._count >= _ENOUGH or (not self.mean and self._count > 0):
            self.mean = self._tokens / self._count


class LoadMeter:
    """Owner of the last reading."""

    def __init__(self) -> None:
        self._last: MeshCounts | None = None
        self._prompt, self._answer = _TokensOfEach(_HALF_LIFE), _TokensOfEach(_HALF_LIFE)
        self._step = _TokensOfEach()

    def look(self, now: MeshCounts) -> MeshSeen | None:
        """What has come since the last reading; None at the first."""
        last, self._last = self._last, now
        seconds = 0.0 if last is None else now.at - last.at
        if last is None or seconds <= 0:
            return None
        arrived = _more(now.arrived, last.arrived)
        placed = now.computed_tokens - last.computed_tokens + now.queued_tokens - last.queued_tokens
        self._prompt.add(placed, arrived - (now.held - last.held), seconds)
        generated = now.answer_tokens - last.answer_tokens
        ended = now.begun - last.begun - (now.sequences - last.sequences)
        self._answer.add(generated, ended, seconds)
        self._step.add(generated, generated - (now.accepted_tokens - last.accepted_tokens), seconds)
        came = placed + (now.held - last.held) * self._prompt.mean
        return MeshSeen(
            at=now.at,
            requests_per_s=arrived / seconds,
            prompt_tokens_per_s=max(0.0, came) / seconds,
            computed_per_s=_more(now.computed_tokens, last.computed_tokens) / seconds,
            answer_tokens=self._answer.mean,
            generated_per_s=max(0.0, generated) / seconds,
            ended_per_s=ended / seconds,
            backlog_tokens=now.queued_tokens + now.held * self._prompt.mean,
            sequences=now.sequences,
            kv_used=now.kv_used,
            pace=replace(now.pace, step_tokens=max(1.0, self._step.mean)),
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
