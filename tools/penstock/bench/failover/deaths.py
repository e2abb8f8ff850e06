"""One death in the middle of some streams, on a mesh of real processes."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass
from typing import Any

from openai import APIError, AsyncOpenAI

from penstock.bench.failover.kinds import ALONE
from penstock.testing.mortal import MortalMesh
from penstock.testing.telling import Told, tell

STREAMS = 4
_TOKENS = 160
"""Of each answer."""
_AT = (1, 24)
"""The tokens of the first stream at which somebody dies, in turn."""
_TRIES = 3
_MODEL = "penstock-mini"


@dataclass(frozen=True, slots=True)
class Parts:
    """Of what the longest gap consists when a plan was lost, in seconds."""

    noticed: float
    """From the death until the gateway has given the worker up."""
    planned: float
    """Until it has another plan."""
    resumed: float
    """Until the client has the next event: KV is fetched, the rest computed."""


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What became of the streams of one death."""

    gap_s: float
    """The longest wait of a client for an event, of those that ended after the death, in the streams that it struck."""
    lost: int
    """Streams that ended with an error."""
    wrong: int
    """Tokens that are not those of an unbroken run, or are missing."""
    struck: int
    """Streams that the one who died worked for."""
    parts: Parts | None = None


@dataclass(slots=True)
class _Death:
    """Who dies, and when."""

    mesh: MortalMesh
    service: str
    number: signal.Signals
    name: str = ""
    at: float = 0.0
    """On the monotonic clock; 0: not yet."""
    back: Any = None

    def strike(self, first: Told) -> None:
        """Sends the signal: to the worker that decodes the first stream, where it is a decode worker that dies."""
        names = {"prefill": "prefill-0", ALONE: "decode-0", "decode": self.mesh.members.get(first.decode, "")}
        self.name = names.get(self.service, self.service)
        self.at = time.monotonic()
        self.back = self.mesh.send(self.name, self.number)


async def death(
    mesh: MortalMesh, client: AsyncOpenAI, service: str, number: signal.Signals, *, round: int
) -> Aftermath:
    """Sends a signal to a service while streams run whose prompts are new. Returns when they have ended, the service is
    back and the same answers were given once more by a mesh in which nobody died.

    A death that strikes no stream does not count: another follows. Raises RuntimeError after too many of them.
    """
    for attempt in range(_TRIES):
        found = await _death(_Death(mesh, service, number), client, round, f"{round} {attempt}")
        if found.struck:
            return found
    raise RuntimeError(f"{service} died {_TRIES} times without a stream that it worked for")


async def _death(what: _Death, client: AsyncOpenAI, round: int, name: str) -> Aftermath:
    bodies = [_body(f"{what.service} {what.number.name} {name} {stream}") for stream in range(STREAMS)]
    first = Told()
    at, delay_s = _AT[round % len(_AT)], 0.0
    if what.service == "prefill" and at > 1:
        calm = await undisturbed(client, f"{what.number.name} {name}")
        at, delay_s = 0, max(told.arrivals[1] - told.arrivals[0] for told in calm) / 2

    def act() -> None:
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, what.strike, first)
        else:
            what.strike(first)

    asked = [tell(client, bodies[0], at=at, act=act, told=first), *(tell(client, body) for body in bodies[1:])]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    if what.number is signal.SIGSTOP:
        what.back = what.mesh.send(what.name, signal.SIGKILL)
    await what.back()
    lost, wrong, struck = 0, 0, []
    for body, answer in zip(bodies, answers, strict=True):
        if not isinstance(answer, Told):
            if not isinstance(answer, APIError):
                raise answer
            lost += 1
            continue
        record: Any = await client.get(f"/requests/{answer.id}", cast_to=object)
        if _strikes(what, answer, record):
            struck.append((answer.gap_s(what.at), answer, record))
        expected = (await tell(client, body)).ids
        wrong += sum(a != b for a, b in zip(answer.ids, expected, strict=False))
        wrong += abs(len(expected) - len(answer.ids))
    if not struck:
        return Aftermath(0.0, lost, wrong, lost)
    gap_s, answer, record = max(struck, key=lambda found: found[0])
    return Aftermath(gap_s, lost, wrong, len(struck) + lost, _parts(what.at, answer, record))


async def undisturbed(client: AsyncOpenAI, name: str) -> list[Told]:
    """As many streams, whose prompts are as new, while nobody dies."""
    return await asyncio.gather(*(tell(client, _body(f"{name} undisturbed {number}")) for number in range(STREAMS)))


def _strikes(what: _Death, answer: Told, record: Any) -> bool:
    """Whether a stream needed the one who died: a decode worker's own streams were planned again; prefill had not
    handed a prompt off before decode's first token; the others serve all."""
    if what.service in ("decode", ALONE):
        return bool(record["replans"])
    if what.service == "prefill":
        return sum(at <= what.at for at in answer.arrivals[1:]) <= 1
    return answer.arrivals[-1] > what.at


def _parts(died_at: float, answer: Told, record: Any) -> Parts | None:
    """The gateway's times are those since the request's first byte, a few milliseconds after the client has asked."""
    attempts, began = record["choices"][0]["attempts"], answer.arrivals[0]
    if len(attempts) < 2 or attempts[0]["lost"] is None:
        return None
    lost_at, planned_at = began + attempts[0]["lost"]["at"], began + attempts[1]["at"]
    heard_at = next((at for at in answer.arrivals if at > planned_at), planned_at)
    return Parts(max(0.0, lost_at - died_at), planned_at - lost_at, heard_at - planned_at)


def _body(name: str) -> dict[str, Any]:
    return {
        "model": _MODEL,
        "prompt": f"This is the story of {name}. " * 20,
        "max_tokens": _TOKENS,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
