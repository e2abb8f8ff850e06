"""A stream's events as they are written: with ids where it can be gone on with, without those that its client has."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.gateway.api.inquiry import Json, Shape, Style
from penstock.gateway.completing.delta import Delta
from penstock.gateway.completing.repeating import EventPlace, TokenPlace, identified
from penstock.gateway.completing.usage import Usage


class Telling:
    """Writes the events of a stream that nobody goes on with."""

    def __init__(self, shape: Shape, style: Style) -> None:
        self._shape = shape
        self._style = style

    def begin(self, usage: Usage) -> bytes:
        """The events before the first delta."""
        return self._style.written(self._shape.begin(usage))

    def more(self, delta: Delta) -> bytes:
        """The events for one delta."""
        return self._shape.text(delta) or self._style.written(self._shape.events(delta))

    def end(self, usage: Usage) -> bytes:
        """The events after the last delta. Raises Refused when the client says that it has more."""
        return self._style.written(self._shape.end(usage))


class TellingByTokens(Telling):
    """An event's id counts the tokens until then. The events that a delta begins with may be told twice: they have no
    text."""

    def __init__(self, shape: Shape, style: Style, place: TokenPlace) -> None:
        super().__init__(shape, style)
        self._place = place

    def more(self, delta: Delta) -> bytes:
        """The events for one delta; of its end, the texts before it are an event of their own."""
        if self._place.has(delta):  # the end, which is told so that the stream ends
            return b""
        if (missed := self._place.missed.pop(delta.choice, None)) is not None:
            self._shape.events(missed)
        if not delta.finish:
            return identified(super().more(delta), self._place.passed(delta, delta.upto))
        *texts, end = (self._style.written([event]) for event in self._shape.events(delta))
        before = identified(b"".join(texts), self._place.passed(delta, delta.upto - 1)) if texts else b""
        return before + identified(end, self._place.passed(delta, delta.upto))


class TellingByEvents(Telling):
    """An event's id counts the events until then."""

    def __init__(self, shape: Shape, style: Style, place: EventPlace) -> None:
        super().__init__(shape, style)
        self._place = place

    def begin(self, usage: Usage) -> bytes:
        """As of any stream."""
        return self._events(self._shape.begin(usage))

    def more(self, delta: Delta) -> bytes:
        """As of any stream."""
        text = self._shape.text(delta)
        return self._events(self._shape.events(delta)) if text is None else self._event(text)

    def end(self, usage: Usage) -> bytes:
        """As of any stream."""
        events = self._events(self._shape.end(usage))
        self._place.end()
        return events

    def _events(self, events: Sequence[Json]) -> bytes:
        return b"".join(self._event(self._style.written([event])) for event in events)

    def _event(self, event: bytes) -> bytes:
        """A written event, if the client does not have it."""
        id = self._place.passed()
        return identified(event, id) if id else b""


def telling(shape: Shape, style: Style, place: TokenPlace | EventPlace | None) -> Telling:
    """What writes the events of a stream whose client has come to `place`; None: it can't be gone on with."""
    if place is None:
        return Telling(shape, style)
    if isinstance(place, TokenPlace):
        return TellingByTokens(shape, style, place)
    return TellingByEvents(shape, style, place)
