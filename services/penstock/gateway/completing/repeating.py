"""Requests that a client can send again: to another gateway, with the same answer, from where it has broken off.

A gateway that dies takes the connections of its clients with it, and what it knew of their requests. Nothing of that is
needed: the same request gives the same tokens. So a client names its request with a key of its own choice. The key
stands for the seed and the id of the answer, at each gateway with the same server key; the events of the stream have
ids that say how many tokens they are from; and who asks again with the last id gets what comes after it. What was
computed before is found in the cache as by any next turn, and the tokens that the client has are generated once more.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.errors import InvalidRequest, Refused
from penstock.gateway.completing.delta import Delta
from penstock.gateway.request.ask import Ask

LAST_EVENT = "last-event-id"
_DATA = b"\ndata: "
_EVENT = re.compile(r"(?P<tag>[0-9a-f]{12})-(?P<tokens>\d{1,9}(\.\d{1,9})*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class RepeatKey:
    """A client's name for its request, and how much of the answer it has."""

    secret: bytes
    """Of the tenant and its key; 32 bytes."""
    last_event: str = ""
    """The id of the last event that the client has; empty: it has none."""

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
class ResumePoint:
    """How far the client of a repeatable request has come, in tokens of each choice; one more than its tokens: it has
    the end."""

    tag: str
    """Of the request and of the model that answers it: another one would go on with other tokens."""
    had: Sequence[int]
    """What the client had when it asked."""
    upto: list[int] = field(default_factory=list)
    """What it has when the deltas have arrived that were taken so far."""
    missed: dict[int, Delta] = field(default_factory=dict)
    """What it had already, by choice, until the first delta that it has not."""

    @property
    def resumes(self) -> bool:
        """Whether the client has a part of the answer."""
        return any(self.had)

    def holds_back(self, delta: Delta) -> bool:
        """Whether the client has the delta, which is kept then."""
        if delta.upto > self.had[delta.choice]:
            return False
        if (earlier := self.missed.get(delta.choice)) is None:
            self.missed[delta.choice] = delta
        else:
            earlier.merge(delta)
        return True

    def last(self, delta: Delta) -> Delta:
        """The end of a choice, which is told again to a client that has it, without the text before it."""
        if delta.upto > self.had[delta.choice]:
            return delta
        self.holds_back(msgspec.structs.replace(delta, finish=None, stop=""))
        return Delta(delta.choice, finish=delta.finish, stop=delta.stop, upto=delta.upto)

    def event(self, deltas: Iterable[Delta]) -> str:
        """The id of the event that brings the last of these deltas."""
        for delta in deltas:
            self.upto[delta.choice] = max(self.upto[delta.choice], delta.upto)
        return f"{self.tag}-{'.'.join(map(str, self.upto))}"


def resume_point(key: RepeatKey, parts: Iterable[bytes], choices: int) -> ResumePoint:
    """Where the answer to a request begins. `parts` are all that it and the model are made of. Raises InvalidRequest,
    and Refused for the id of an event of another request, or of another model's answer."""
    digest = hashlib.sha256(key.secret)
    for part in parts:
        digest.update(len(part).to_bytes(8) + part)
    tag, had = digest.hexdigest()[:12], [0] * choices
    if key.last_event:
        match = _EVENT.fullmatch(key.last_event)
        if match is None:
            right = "must be the id of an event of this request's stream"
            raise InvalidRequest(f"{LAST_EVENT} = {key.last_event[:40]!r}: {right}", field=LAST_EVENT)
        had = [int(tokens) for tokens in match["tokens"].split(".")]
        if match["tag"] != tag or len(had) != choices:
            why = "the request is not the one whose stream this event is from, or the model has changed since"
            raise Refused(f"{LAST_EVENT}: {why}", field=LAST_EVENT, code="not_resumable")
    return ResumePoint(tag, had, list(had))


def identified(events: bytes, id: str) -> bytes:
    """Server-sent events, the last of which has an id. JSON has no line ends in it."""
    at = events.rfind(_DATA) + 1  # 0: there is one, and it begins with its data
    return events[:at] + b"id: " + id.encode() + b"\n" + events[at:]


def request_parts(
    seed: int, fingerprint: str, ask: Ask, prompts: Iterable[Sequence[int]], grammars: Iterable[str]
) -> Iterator[bytes]:
    """All that makes the tokens of an answer, and its text: for `resume_point`."""
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
