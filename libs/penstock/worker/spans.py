"""The stages of one request at one worker, as spans below the one of its call.

They follow each other: `fetch`, or `handoff` where another worker computes the prompt meanwhile, is the time in the
source of the KV; `queue` from there to the first step; `prefill` to the first token; `decode` to the last. What was
drafted is an event of `decode`.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import time_ns

from opentelemetry import trace

from penstock.engine.request import Update
from penstock.runtime.drafts import by_proposer


class StageSpans:
    """Of a request that begins now. Made by `stage_spans`."""

    def __init__(self, source: str) -> None:
        self._tracer = trace.get_tracer("penstock")
        self._source = source
        self._at = time_ns()
        """Where the next stage begins."""
        self._last: Update | None = None

    def tell(self, update: Update, used: Mapping[str, int]) -> None:
        """There are tokens, for the first time or once more; `used` are given tokens that it found, by tier."""
        first, self._last = self._last is None, update
        if not first:
            return
        tokens = {f"penstock.tokens.{tier}": count for tier, count in used.items() if count}
        self._span(self._source, update.load_s, tokens)
        self._span("queue", update.queue_s, {"penstock.preemptions": update.preemptions})
        self._span("prefill", update.prefill_s, {"penstock.tokens.computed": update.computed_tokens})

    def end(self) -> None:
        """The request has ended, or was left."""
        if (last := self._last) is None or last.decode_s <= 0:
            return
        span = self._tracer.start_span("decode", start_time=self._at)
        drafts = last.drafts
        if drafts.any:
            told: dict[str, int | float] = {"passes": drafts.passes, "waited_s": drafts.waited_s}
            told |= {f"verified.{name}": count for name, count in by_proposer(drafts.verified).items()}
            told |= {f"accepted.{name}": count for name, count in by_proposer(drafts.right).items()}
            span.add_event("drafts", told, self._at + int(last.decode_s * 1e9))
        span.end(self._at + int(last.decode_s * 1e9))

    def _span(self, name: str, seconds: float, more: Mapping[str, int]) -> None:
        begin, self._at = self._at, self._at + int(seconds * 1e9)
        self._tracer.start_span(name, start_time=begin, attributes=more).end(self._at)


def stage_spans(*, handoff: bool) -> StageSpans | None:
    """Of a request of the current call; None: nobody records it, and nothing is to be paid for."""
    if not trace.get_current_span().is_recording():
        return None
    return StageSpans("handoff" if handoff else "fetch")
