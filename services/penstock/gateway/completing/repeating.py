"""Requests that a client can send again: to another gateway, with the same answer, from where it has broken off.

A gateway that dies takes the connections of its clients with it, and what it knew of their requests. Nothing of that is
needed: the same request gives the same tokens. So a client names its request with a key of its own choice. The key
stands for the seed and the ids of the answer, at each gateway with the same server key; what comes in the stream has
ids that say how much of the answer came until then; and who asks again with the last id gets what comes after it. What
was computed before is found in the cache as by any next turn. The tokens that were generated are found in
`stored_answers`, where gateways share those; else they are generated once more.

Pieces that stand alone are named by the tokens of each choice until then. Events that build on each other, several of
which may come of one token, are counted themselves.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from penstock.errors import InvalidRequest, Refused
from penstock.gateway.completing.delta import Delta
from penstock.gateway.request.ask import Ask

LAST_EVENT = "last-event-id"
TOKENS = "tokens"
"""What ids count, unless an API has events that build on each other."""
_DATA = b"\ndata: "
_EVENT = re.compile(r"(?P<tag>[0-9a-f]{12})-(?P<counts>\d{1,9}(\.\d{1,9})*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class RepeatKey:
    """A client's name for its request, and how much of the answer it has."""

    secret: bytes
    """Of the tenant and its key; 32 bytes."""
    last_event: str = ""
    """The id of the last event that the client has; empty: it has none."""
    counts: str = TOKENS
    """What ids of the stream count: TOKENS, or the name of the events of an API."""

    @property
    def id(self) -> str:
        """Of the answer."""
        return self.secret[:12].hex()

    @property
    def seed(self) -> int:
        """For a request that names none; 53 bits, as all that clients are told."""
        return int.from_bytes(self.secret[12:20]) >> 11

    def call(self, choice: int, number: int) -> bytes:
        """12 bytes for the id of a call, which is told more than once."""
        return hashlib.sha256(b"call" + choice.to_bytes(8) + number.to_bytes(8) + self.secret).digest()[:12]


@dataclass(slots=True)
class TokenPlace:
    """How far the client of a repeatable request has come, in tokens of each choice; see `Delta.upto`."""

    tag: str
    """Of the request and of the model that answers it: another one would go on with other tokens."""
    had: Sequence[int]
    """What the client had when it asked."""
    upto: list[int] = field(default_factory=list)
    """What it has when the deltas have arrived that were taken so far."""
    missed: dict[int, Delta] = field(default_factory=dict)
    """What it had already, by choice, until the first delta that it has not."""

    @property
    def id(self) -> str:
        """Of the event that came last."""
        return f"{self.tag}-{'.'.join(map(str, self.upto))}"

    def has(self, delta: Delta) -> bool:
        """Whether the client has all of the delta."""
        return 0 < delta.upto <= self.had[delta.choice]

    def holds_back(self, delta: Delta) -> bool:
        """Whether the client has the delta, which is kept then."""
        if not self.has(delta):
            return False
        if (earlier := self.missed.get(delta.choice)) is None:
            self.missed[delta.choice] = delta
        else:
            earlier.merge(delta)
        return True

    def last(self, delta: Delta) -> Delta:
        """The end of a choice, without the text before it if the client has that. Raises Refused when the client says
        that it has more."""
        had, text = self.had[delta.choice], msgspec.structs.replace(delta, finish=None, stop="", upto=delta.upto - 1)
        if had > delta.upto:
            what = f"choice {delta.choice} of this answer ends with {delta.upto}"
            raise not_of_this(f"{self.tag}-{'.'.join(map(str, self.had))}", what)
        if not self.holds_back(text):
            return delta
        return Delta(delta.choice, finish=delta.finish, stop=delta.stop, upto=delta.upto)

    def passed(self, delta: Delta, upto: int) -> str:
        """The id of the event that brings a delta as far as `upto`."""
        self.upto[delta.choice] = max(self.upto[delta.choice], upto)
        return self.id


@dataclass(slots=True)
class EventPlace:
    """How far the client of a repeatable request has come, in events. All are made again, as those that follow build on
    them: of the same deltas, so that they are the same."""

    tag: str
    """As that of `TokenPlace`."""
    had: int
    """How many the client had when it asked."""
    made: int = 0

    def holds_back(self, _delta: Delta) -> bool:
        """No delta is: only events are left out."""
        return False

    def last(self, delta: Delta) -> Delta:
        """The end, as it is."""
        return delta

    def passed(self) -> str:
        """The id of the next event; empty when the client has it."""
        self.made += 1
        return f"{self.tag}-{self.made}" if self.made > self.had else ""

    def end(self) -> None:
        """There are no more events. Raises Refused when the client says that it has more."""
        if self.had > self.made:
            raise not_of_this(f"{self.tag}-{self.had}", f"this answer has {self.made} events")


def not_of_this(last_event: str, why: str) -> Refused:
    """The error for the id of an event that the stream does not have."""
    what = f"{LAST_EVENT} = {last_event!r}: {why}; send the id of an event of this request's stream, or none"
    return Refused(what, field=LAST_EVENT, code="not_resumable")


def secret_of(key: RepeatKey, parts: Iterable[bytes]) -> bytes:
    """What stands for a request with this key, its answer included: 32 bytes. `parts` are all that it and the model are
    made of."""
    digest = hashlib.sha256(key.secret)
    for part in parts if key.counts == TOKENS else chain((key.counts.encode(),), parts):
        digest.update(len(part).to_bytes(8) + part)
    return digest.digest()


def place_of(key: RepeatKey, secret: bytes, choices: int) -> TokenPlace | EventPlace:
    """Where the answer to a request goes on; `secret` is that of `secret_of`. Raises InvalidRequest, and Refused for
    the id of an event of another request, or of another model's answer."""
    by_tokens = key.counts == TOKENS
    tag, places = secret.hex()[:12], choices if by_tokens else 1
    had = [0] * places
    if key.last_event:
        match = _EVENT.fullmatch(key.last_event)
        if match is None:
            right = "must be the id of an event of this request's stream"
            raise InvalidRequest(f"{LAST_EVENT} = {key.last_event[:40]!r}: {right}", field=LAST_EVENT)
        had = [int(count) for count in match["counts"].split(".")]
        if match["tag"] != tag or len(had) != places:
            raise not_of_this(key.last_event[:40], "it is of another request, or the model has changed since")
    return TokenPlace(tag, had, [*had]) if by_tokens else EventPlace(tag, had[0])


def identified(events: bytes, id: str) -> bytes:
    """Server-sent events, the last of which has an id. JSON has no line ends in it."""
    at = events.rfind(_DATA) + 1  # 0: there is one, and it begins with its data
    return events[:at] + b"id: " + id.encode() + b"\n" + events[at:]


def request_parts(
    seed: int, fingerprint: str, ask: Ask, prompts: Iterable[Sequence[int]], grammars: Iterable[str]
) -> Iterator[bytes]:
    """All that makes the tokens of an answer, and its text: for `secret_of`."""
    of = ask.sampling
    yield fingerprint.encode()
    numbers = (seed, ask.n, of.max_tokens, of.min_tokens, of.temperature, of.top_p, of.top_k, of.min_p, of.ignore_eos)
    penalties = (of.repetition_penalty, of.presence_penalty, of.frequency_penalty)
    tokens = (sorted(of.logit_bias.items()), sorted(of.stop_token_ids), sorted(of.banned_token_ids))
    yield repr((numbers, penalties, tokens, [*of.bad_words], [*ask.stops], ask.show_stop)).encode()
    for prompt in prompts:
        yield array("I", prompt).tobytes()
    for grammar in grammars:
        yield grammar.encode()
