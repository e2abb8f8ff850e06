"""Penstock's extension of OpenAI's API: which blocks to keep, for how long, when the session returns, and when tokens
are wanted.

Times are written as `"30s"`, `"5m"`, `"1h"`, or as a number of seconds.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Annotated

import msgspec

from penstock.chat.messages import Message
from penstock.errors import InvalidRequest
from penstock.gateway.api.fields import honoured
from penstock.gateway.request import bounds
from penstock.gateway.request.ask import Keep, Urgency
from penstock.gateway.request.bounds import BOUNDS, check, number
from penstock.kv.hint import ReturnHint

_TIME = re.compile(r"(\d{1,9})([smh])")
_UNITS = {"s": 1, "m": 60, "h": 3600}
DEFAULT_TTL_S = 300.0
"""The time for a `cache_control` without `ttl`."""

Time = str | float
"""A length of time as clients write it."""


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    """`cache_control` of a message or of a part of it: asks to keep the prompt up to this place."""

    type: str
    ttl: Time | None = None


class SessionBody(msgspec.Struct, forbid_unknown_fields=True):
    """The client's knowledge of its session's future."""

    ended: bool | None = None
    returns_in: Time | None = None

    def outlook(self, field: str) -> ReturnHint:
        """The checked hint; `field` is its place in the body, empty for the whole body. Raises InvalidRequest."""
        place = f"{field}.returns_in" if field else "returns_in"
        if self.ended and self.returns_in is not None:
            raise InvalidRequest(f"{place}: must not be sent together with ended", field=place)
        returns_in = None
        if self.returns_in is not None:
            returns_in = seconds("penstock.session.returns_in", self.returns_in, place)
        return ReturnHint(bool(self.ended), returns_in)


class SloBody(msgspec.Struct, forbid_unknown_fields=True):
    """The request is refused at once when it is predicted that it takes longer."""

    ttft: Annotated[Time | None, honoured("from the request's arrival to the first token")] = None
    itl: Annotated[Time | None, honoured("from each token to the next")] = None


class Extension(msgspec.Struct, forbid_unknown_fields=True):
    """The field `penstock` of a request."""

    retain: Time | None = None
    """Keep the whole prompt, and the answer."""
    session: SessionBody | None = None
    priority: Annotated[int | None, honoured("beside others of the account; lower is earlier")] = None
    slo: Annotated[SloBody | None, honoured("refused at once when predicted to take longer")] = None
    drafts: Annotated[bool | None, honoured("false: decoded token by token, the same tokens")] = None

    def urgency(self, priority: int | None = None) -> Urgency:
        """When the answer is wanted; `priority` is another field with that meaning. Raises InvalidRequest."""
        check("priority", priority)
        check("penstock.priority", self.priority)
        if None not in (priority, self.priority) and priority != self.priority:
            raise InvalidRequest("priority: must not be sent together with penstock.priority", field="priority")
        slo = self.slo or SloBody()
        return Urgency(
            priority=priority or self.priority or 0,
            ttft_s=inf if slo.ttft is None else seconds("penstock.slo.ttft", slo.ttft, "penstock.slo.ttft"),
            itl_s=inf if slo.itl is None else seconds("penstock.slo.itl", slo.itl, "penstock.slo.itl"),
        )

    def retain_s(self) -> float:
        """Seconds to keep the prompt and the answer; 0: the client did not ask for it. Raises InvalidRequest."""
        return 0.0 if self.retain is None else seconds("penstock.retain", self.retain, "penstock.retain")


class OpenAIExtension(Extension, forbid_unknown_fields=True):
    """The field `penstock` of chat completions and completions."""

    proposers: Annotated[bool | None, honoured("every choice says of each token whose draft it was")] = None


def seconds(bound: str, given: Time, field: str) -> float:
    """A length of time within the bounds of that name. Raises InvalidRequest."""
    limits = BOUNDS[bound]
    found: float | None = given if isinstance(given, int | float) else None
    if isinstance(given, str) and (match := _TIME.fullmatch(given)):
        found = int(match[1]) * _UNITS[match[2]]
    if found is None or not limits.low <= found <= limits.high:  # also for a NaN
        shown = repr(given[:40]) if isinstance(given, str) else f"{given:g}"
        right = f'"30s", "5m", "1h" or a number of seconds, {number(limits.low)} to {number(limits.high)}'
        raise InvalidRequest(f"{field}: must be {right}, not {shown}", field=field)
    return float(found)


def keep_of(control: CacheControl, field: str, upto: Sequence[Message]) -> Keep:
    """The wish that a `cache_control` expresses. Raises InvalidRequest."""
    if control.type != "ephemeral":
        raise InvalidRequest(f'{field}.type: must be "ephemeral", not {control.type[:40]!r}', field=f"{field}.type")
    ttl = DEFAULT_TTL_S if control.ttl is None else seconds("penstock.retain", control.ttl, f"{field}.ttl")
    return Keep(ttl, tuple(upto))


def check_marks(count: int) -> None:
    """Raises InvalidRequest for too many marks. Whoever finds them asks before it takes up the text before one more."""
    if count > bounds.MAX_MARKS:
        raise InvalidRequest(f"messages: at most {bounds.MAX_MARKS} may have cache_control", field="messages")


def keeps_of(messages: Sequence[Message], marks: Sequence[tuple[int, str | None, str, CacheControl]]) -> Iterator[Keep]:
    """The wishes of the marks; each is (number of its message, text up to it if it is inside, its place, the mark)."""
    check_marks(len(marks))
    for at, text, field, control in marks:
        upto = messages[: at + 1]
        if text is not None:  # a mark inside the content comes before the calls
            upto = [*messages[:at], replace(messages[at], content=text, calls=())]
        yield keep_of(control, field, upto)
