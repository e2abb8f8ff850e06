"""The sequences of one decode worker, as the draft service knows them: they are sent as differences."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from penstock.draft.config import DraftConfig
from penstock.engine.hooks import DraftAsk, GrammarAsk
from penstock.errors import InvalidRequest
from penstock.grammar.guide import Guide
from penstock.rpc.context import read_trace
from penstock.v1 import draft_pb2

GuideOf = Callable[[GrammarAsk], Guide | None]
_MAX_K = 64
_NO_TOKENS = array("I")


class DraftStream:
    """The sequences that one decode worker has told of, within the bounds of `config`."""

    def __init__(
        self, name: int, forget: Callable[[str], None], config: DraftConfig, guide: GuideOf = lambda asked: None
    ) -> None:
        """`guide` gives the way through a grammar, or None when there is none yet."""
        self._name = name
        self._forget = forget
        self._guide = guide
        self._most_sequences = config.max_stream_sequences
        self._most_tokens = config.max_stream_tokens
        self._tokens: dict[int, array[int]] = {}
        self._held = 0
        """Tokens of all sequences. A letter of a grammar counts as one."""
        self._grammars: dict[int, GrammarAsk] = {}
        self._guides: dict[int, Guide] = {}
        self._spans: dict[int, Span] = {}

    def apply(self, message: draft_pb2.DraftAsk) -> None:
        """Takes in the differences. Raises InvalidRequest when they do not fit."""
        for id in message.forget:
            self._drop(id)
        for sequence in message.sequences:
            known = self._tokens.get(sequence.id, _NO_TOKENS)
            if sequence.keep > len(known):
                self._drop(sequence.id)
                continue
            self._check(sequence, len(known))
            if sequence.traceparent and sequence.id not in self._spans:
                self._spans[sequence.id] = _span(sequence.traceparent)
            self._extend(sequence)

    def asks(self, message: draft_pb2.DraftAsk) -> list[tuple[int, DraftAsk]]:
        """The sequences to propose for; those that are unknown here are left out."""
        return [(sequence.id, self._ask(sequence)) for sequence in message.sequences if self._tokens.get(sequence.id)]

    def unknown(self, message: draft_pb2.DraftAsk) -> list[int]:
        """Sequences that have to be sent whole."""
        return [sequence.id for sequence in message.sequences if sequence.id not in self._tokens]

    def close(self) -> None:
        """Forgets everything."""
        for id in list(self._tokens):
            self._drop(id)

    def _check(self, sequence: draft_pb2.DraftSequence, known: int) -> None:
        """Raises InvalidRequest when the stream may not hold the sequence, which has `known` tokens so far."""
        if sequence.id not in self._tokens and len(self._tokens) >= self._most_sequences:
            right = f"a stream may have {self._most_sequences} at a time"
            raise InvalidRequest(f"sequences: {right}", field="sequences")
        change = sequence.keep + len(sequence.tokens) - known
        if sequence.HasField("grammar"):
            old = self._grammars.get(sequence.id)
            change += len(sequence.grammar.text) - (len(old.text) if old else 0)
        if self._held + change > self._most_tokens:
            right = f"the sequences of a stream may have {self._most_tokens} together"
            raise InvalidRequest(f"tokens: {right}", field="tokens")

    def _extend(self, sequence: draft_pb2.DraftSequence) -> None:
        tokens = self._tokens.setdefault(sequence.id, array("I"))
        before = len(tokens)
        if sequence.keep < before:
            self._guides.pop(sequence.id, None)  # it has followed other tokens
        del tokens[sequence.keep :]
        tokens.extend(sequence.tokens)
        self._held += len(tokens) - before
        if sequence.HasField("grammar"):
            self._add_grammar(sequence.id, sequence.grammar)

    def _add_grammar(self, id: int, own: draft_pb2.DraftGrammar) -> None:
        self._drop_grammar(id)
        self._grammars[id] = GrammarAsk(own.text, own.prompt, frozenset(own.ends))
        self._held += len(own.text)

    def _drop_grammar(self, id: int) -> None:
        self._guides.pop(id, None)
        grammar = self._grammars.pop(id, None)
        if grammar is not None:
            self._held -= len(grammar.text)

    def _guide_of(self, id: int) -> Guide | None:
        """The sequence's way through its grammar, as soon as that is compiled."""
        if id not in self._guides and id in self._grammars:
            guide = self._guide(self._grammars[id])
            if guide is not None:
                self._guides[id] = guide
        return self._guides.get(id)

    def _ask(self, sequence: draft_pb2.DraftSequence) -> DraftAsk:
        return DraftAsk(
            id=f"{self._name}/{sequence.id}",
            tokens=self._tokens[sequence.id],
            k=min(sequence.k, _MAX_K),
            seed=sequence.seed,
            temperature=sequence.temperature,
            top_k=sequence.top_k,
            top_p=sequence.top_p,
            min_p=sequence.min_p,
            guide=self._guide_of(sequence.id),
        )

    def _drop(self, id: int) -> None:
        tokens = self._tokens.pop(id, None)
        if tokens is not None:
            self._held -= len(tokens)
            self._drop_grammar(id)
            self._forget(f"{self._name}/{id}")
        span = self._spans.pop(id, None)
        if span is not None:
            span.end()


def _span(traceparent: str) -> Span:
    """One sequence's time in this service, as a part of its request's trace."""
    parent = read_trace([("traceparent", traceparent)])
    return trace.get_tracer("penstock").start_span("Draft/Sequence", parent, SpanKind.SERVER)
