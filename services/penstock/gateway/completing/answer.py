"""From tokens to deltas: one choice's text, stop strings, reasoning, tool calls and logprobs.

Stop strings end content and reasoning. In calls they mean nothing: a call that has begun is made, or cut by the limit
of tokens, and then the choice ends with "length".
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection

from penstock.chat.detokenize import TokenBytes
from penstock.chat.events import CallArguments, CallStart, Content, Event, Reasoning
from penstock.chat.formats.parser import AssistantParser
from penstock.chat.model import ChatModel
from penstock.chat.stops import StopAutomaton, StopMatcher
from penstock.gateway.completing.delta import CallDelta, Delta, TokenLogprob
from penstock.gateway.request.work import SampledToken


def draw(_call: int) -> bytes:
    """What tells a call's id from those of all others."""
    return secrets.token_bytes(12)


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
        show_stop: bool = False,
        keep_ids: bool = False,
        keep_proposers: bool = False,
        draw: Callable[[int], bytes] = draw,
    ) -> None:
        """`ends` are tokens whose text is not shown when they end the choice. `show_stop`: the stop string is shown.
        `keep_ids`: deltas hold token ids; `keep_proposers`: and whose drafts they were. `draw` gives 12 bytes for the
        id of a call, by its number."""
        self.choice = choice
        self.tokens = 0
        """Number of generated tokens that count."""
        self.reasoning_tokens = 0
        self.ended = False
        """A stop string was found; later tokens are neither counted nor shown."""
        self._call_id = model.family.call_id
        self._text = model.text_stream()
        self._bytes: TokenBytes = model.token_bytes
        self._parser = parser
        self._stops = StopMatcher(stops) if stops else None
        self._kind: type[Content | Reasoning] = Content
        """What the text is that may still become a stop string."""
        self._ends = ends
        self._min_tokens = min_tokens
        self._show_stop = show_stop
        self._keep_ids = keep_ids
        self._keep_proposers = keep_proposers
        self._draw = draw
        self._decoded = 0
        self._verbatim = False
        """Text is content as it is: nothing in it has a meaning of its own, and nothing that stands in it ends it."""

    def feed(self, token: SampledToken) -> Delta:
        """Takes the next token and returns the text, calls and logprobs that it adds. Every counted token has its
        logprob, also a token without text and those of a stop string."""
        delta = Delta(self.choice)
        if self.ended:
            return delta
        self.tokens += 1
        delta.upto = self.tokens
        if self._keep_ids:
            delta.add_id(token.id)
        if not self._verbatim and self._parser is not None and self._parser.reasoning:
            self.reasoning_tokens += 1
        if self._keep_proposers:
            delta.add_proposer(token.proposer or "")
        if token.logprob is not None:
            delta.add_logprob(self._logprob(token, token.logprob))
        if token.id in self._ends and token.index + 1 >= self._min_tokens:
            return delta
        self._show(self._text.feed(token.id), delta)
        return delta

    def finish(self, reason: str) -> Delta:
        """Ends the choice for `reason` and returns its last delta."""
        delta = Delta(self.choice, upto=self.tokens + 2)
        if not self.ended:
            self._show(self._text.finish(), delta)
        if self._parser is not None and not self.ended:
            self._add(self._parser.finish(), delta)
        if self.ended:
            reason = "stop"
            delta.stop = self._stops.stop if self._stops else ""
        else:
            self._release(delta)
        called = self._parser is not None and self._parser.called
        delta.finish = "tool_calls" if called and reason == "stop" else reason
        return delta

    def _show(self, text: str, delta: Delta) -> None:
        self._decoded += len(text)
        if self._verbatim:
            delta.content += text
        elif text:
            self._add([Content(text)] if self._parser is None else self._parser.feed(text), delta)
            self._verbatim = self._stops is None and (self._parser is None or self._parser.verbatim)

    def _add(self, events: list[Event], delta: Delta) -> None:
        for event in events:
            if self.ended:
                return
            if isinstance(event, CallStart):
                self._release(delta)
                id = self._call_id(event.name, event.given, self._draw(event.index))
                delta.add_call(CallDelta(event.index, id, event.name))
            elif isinstance(event, CallArguments):
                delta.add_call(CallDelta(event.index, arguments=event.text))
            else:
                self._add_text(event, delta)

    def _add_text(self, event: Content | Reasoning, delta: Delta) -> None:
        if self._stops is None:
            _put(type(event), event.text, delta)
            return
        if not isinstance(event, self._kind):
            self._release(delta)
            self._kind = type(event)
        _put(self._kind, self._stops.feed(event.text), delta)
        self.ended = self._stops.found
        if self.ended and self._show_stop:
            _put(self._kind, self._stops.stop, delta)

    def _release(self, delta: Delta) -> None:
        """Gives up waiting for the rest of a stop string: what follows is of another kind, or nothing follows."""
        if self._stops is not None:
            _put(self._kind, self._stops.finish(), delta)

    def _logprob(self, token: SampledToken, logprob: float) -> TokenLogprob:
        top = tuple((self._bytes.of(other), value) for other, value in token.top)
        return TokenLogprob(self._bytes.of(token.id), logprob, top, self._decoded)


def _put(kind: type[Content | Reasoning], text: str, delta: Delta) -> None:
    if text:
        delta.add_text("reasoning" if kind is Reasoning else "content", text)
