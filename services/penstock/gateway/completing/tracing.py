"""The trace of a request that has ended: what the gateway knows of it, below the span of the request.

Its parts follow each other as spans: `body`, `tokenize`, `plan`, and `prompt` from the plan to the first token, which
together are the time to the first token; then `handoff` and `decode`. Where the time of `prompt` went is told by the
worker's own spans and, in seconds, by attributes of this one; `penstock.call_s` is what they leave, the way to the
worker and back. Each loss of a worker is an event, the time until the next plan a span `failover`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from time import perf_counter_ns, time_ns

from opentelemetry import trace

from penstock.gateway.completing.completion import Completion
from penstock.gateway.completing.usage import Usage

_TOLD = ("queue", "fetch", "prefill", "call")
Value = str | int | float


def trace_request(completion: Completion, usage: Usage) -> None:
    """Adds the spans and attributes to the current span, if it is recorded."""
    span = trace.get_current_span()
    if not span.is_recording():
        return
    span.set_attributes(
        {
            "gen_ai.operation.name": "chat" if completion.ask.chat else "text_completion",
            "gen_ai.provider.name": "penstock",
            "gen_ai.request.model": completion.ask.model,
            "gen_ai.response.id": completion.id,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "penstock.tenant": completion.caller.tenant,
            "penstock.first_token_s": usage.times["first_token"],
        }
    )
    clock = _Clock()
    tracer = trace.get_tracer("penstock")
    for name, begin, end, more in (*_parts(completion, usage), *_failovers(completion)):
        tracer.start_span(name, start_time=clock.at(begin), attributes=more).end(clock.at(end))
    for trial in completion.choices[completion.first_choice].flow.account.attempts:
        if (lost := trial.lost) is not None:
            what = {"stage": lost.stage, "worker": lost.member, "error": lost.error.message}
            span.add_event("worker lost", what, clock.at(trial.lost_at))


class _Clock:
    """Unix nanoseconds for times of `time.perf_counter`."""

    def __init__(self) -> None:
        self._offset = time_ns() - perf_counter_ns()

    def at(self, seconds: float) -> int:
        """Of so many seconds of that clock."""
        return self._offset + int(seconds * 1e9)


_Part = tuple[str, float, float, Mapping[str, Value]]


def _parts(completion: Completion, usage: Usage) -> Iterator[_Part]:
    """Names, begins and ends of the parts that took any time, and what more is said of them."""
    times, at = usage.times, completion.caller.began
    told = {f"penstock.{name}_s": times[name] for name in _TOLD}
    told |= {f"penstock.tokens.{tier}": tokens for tier, tokens in usage.cached.items() if tokens}
    told["penstock.tokens.computed"] = usage.computed_tokens
    parts: dict[str, float] = {name: times[name] for name in ("body", "tokenize", "plan")}
    parts |= {"prompt": sum(times[name] for name in _TOLD), "handoff": times["handoff"], "decode": times["decode"]}
    for name, seconds in parts.items():
        if seconds > 0:
            yield name, at, at + seconds, told if name == "prompt" else {}
        at += seconds


def _failovers(completion: Completion) -> Iterator[_Part]:
    for number, choice in enumerate(completion.choices):
        attempts = choice.flow.account.attempts
        for trial, following in pairwise(attempts):
            if trial.lost is not None:
                yield "failover", trial.lost_at, following.planned_at, {"penstock.choice": number}
