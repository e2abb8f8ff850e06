"""From tokens to deltas: one choice's text, stop strings, reasoning, tool calls and logprobs."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection

from penstock.chat.detokenize import TokenBytes
from penstock.chat.events import CallArguments, CallStart, Content, Event
from penstock.chat.model import ChatModel
from penstock.chat.parser import AssistantParser
from penstock.chat.stops import StopAutomaton, StopMatcher
from penstock.gateway.completing.delta import CallDelta, Delta, TokenLogprob
from penstock.gateway.request.work import SampledToken


class Answer:
    """Reads one choice's tokens. `parser` is None for raw completions."""

    def __init__(
        self,
        choice: int,
        model: ChatModel,
        *,
        parser: AssistantParser | None,
        stops: StopAutomaton | None,
        ends: Collection[int],
        min_tokens: int,
        keep_ids: bool = False,
    ) -> None:
        """`ends` are tokens whose text is not shown when they end the choice. `keep_ids`: deltas hold token ids."""
        self.choice = choice
        self.tokens = 0
        """Number of generated tokens that count."""
        self.reasoning_tokens = 0
        self.ended = False
        """A stop string was found; later tokens are neither counted nor shown."""
        self._text = model.text_stream()
        self._bytes: TokenBytes = model.token_bytes
        self._parser = parser
        self._stops = StopMatcher(stops) if stops else None
        self._ends = ends
        self._min_tokens = min_tokens
        self._keep_ids = keep_ids
        self._decoded = 0
        self._released = 0
        self._logprobs: deque[TokenLogprob] = deque()

    def feed(self, token: SampledToken) -> Delta:
        """Takes the next token and returns the text, calls and logprobs that it adds. Every counted token has its
        logprob, also a token without text and those of a stop string."""
        delta = Delta(self.choice)
        if self.ended:
            return delta
        self.tokens += 1
        if self._keep_ids:
            delta.token_ids.append(token.id)
        if self._parser is not None and self._parser.reasoning:
            self.reasoning_tokens += 1
        if token.logprob is not None:
            self._logprobs.append(self._logprob(token, token.logprob))
        if token.id in self._ends and token.index + 1 >= self._min_tokens:
            return delta
        text = self._text.feed(token.id)
        self._decoded += len(text)
        self._show(self._pass_stops(text), delta)
        return delta

    def finish(self, reason: str) -> Delta:
        """Ends the choice for `reason` and returns its last delta."""
        delta = Delta(self.choice)
        if not self.ended:
            text = self._text.finish()
            self._decoded += len(text)
            shown = self._pass_stops(text)
            if self._stops is not None and not self.ended:
                shown += self._stops.finish()
            self._show(shown, delta)
        delta.logprobs += self._logprobs
        if self._parser is not None:
            self._add(self._parser.finish(), delta)
        if self.ended:
            reason = "stop"
        called = self._parser is not None and self._parser.calls > 0
        delta.finish = "tool_calls" if called and reason == "stop" else reason
        return delta

    def _pass_stops(self, text: str) -> str:
        if self._stops is None or not text:
            return text
        shown = self._stops.feed(text)
        self.ended = self._stops.found
        return shown

    def _show(self, text: str, delta: Delta) -> None:
        self._released += len(text)
        while self._logprobs and (self._logprobs[0].offset < self._released):
            delta.logprobs.append(self._logprobs.popleft())
        if not text:
            return
        if self._parser is None:
            delta.content += text
        else:
            self._add(self._parser.feed(text), delta)

    def _add(self, events: list[Event], delta: Delta) -> None:
        for event in events:
            if isinstance(event, Content):
                delta.content += event.text
            elif isinstance(event, CallStart):
                delta.add_call(CallDelta(event.index, f"call_{secrets.token_hex(12)}", event.name))
            elif isinstance(event, CallArguments):
                delta.add_call(CallDelta(event.index, arguments=event.text))
            else:
                delta.reasoning += event.text

    def _logprob(self, token: SampledToken, logprob: float) -> TokenLogprob:
        top = tuple((self._bytes.of(other), value) for other, value in token.top)
        return TokenLogprob(self._bytes.of(token.id), logprob, top, self._decoded)
