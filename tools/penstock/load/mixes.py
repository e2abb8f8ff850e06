"""Workloads that are made up: kinds of sessions, and how often each comes."""

from __future__ import annotations

import hashlib
import random
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from penstock.load.errors import LoadError
from penstock.traces.reading import RecordedAsk, Trace

_BLOCK = 16
_EXAMPLE = "turns=5,system=1200,new=150,output=64,think=2"
_LONGEST = 10_000_000
_TOOK_S = 10.0
"""As if an answer had taken so long: what follows it comes then."""


class MixPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of session. Lengths are in tokens, times in seconds."""

    name: str = ""
    share: float = 1.0
    """How often it comes, beside the shares of the others."""
    turns: int = 1
    system: int = 0
    """What all its sessions begin with."""
    tools: int = 0
    """Definitions of tools, before that."""
    new: int = 256
    """What each turn brings."""
    output: int = 128
    think: float = 0.0
    """From the end of a turn until the next one."""
    spread: float = 0.0
    """How far lengths and think times of turns are apart: the deviation of their logarithm. With 0 all are the same."""
    agents: int = 0
    """Sub-agents that begin after the first turn, and that the second one waits for: each takes over the whole
    conversation and has a turn of its own."""


class _Mix(msgspec.Struct, forbid_unknown_fields=True):
    mix: list[MixPart]


def read_mix(path: Path) -> list[MixPart]:
    """The parts of a TOML file, a table [[mix]] each. Raises LoadError."""
    try:
        parts = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _Mix).mix
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError, msgspec.ValidationError) as error:  # of text, TOML, numbers, depth
        raise LoadError(f"{path} is no mix of sessions: {error}") from None
    return _checked(parts, str(path))


def parse_mix(texts: Sequence[str]) -> list[MixPart]:
    """The parts of a command line, such as turns=5,new=150,output=64. Raises LoadError."""
    parts = []
    for text in texts:
        try:
            fields = dict(pair.split("=", 1) for pair in text.split(",") if pair)
            parts.append(msgspec.convert(fields, MixPart, strict=False))
        except (ValueError, msgspec.ValidationError) as error:
            raise LoadError(f"--mix must be like {_EXAMPLE}, not {text!r}: {error}") from None
    return _checked(parts, "--mix")


def _checked(parts: Sequence[MixPart], where: str) -> list[MixPart]:
    if not parts:
        raise LoadError(f"{where}: no part of a mix")
    least = {"turns": 1, "new": 1, "output": 1, "system": 0, "tools": 0, "think": 0, "spread": 0, "agents": 0}
    for part in parts:
        for name, low in least.items():
            value = getattr(part, name)
            if not low <= value <= _LONGEST:
                raise LoadError(f"{where}: {name} must be from {low} to {_LONGEST}, not {value}")
        if not 0 < part.share <= _LONGEST:
            raise LoadError(f"{where}: share must be above 0, not {part.share}")
    return [*parts]


def mixed(parts: Sequence[MixPart], sessions: int, seed: str) -> Trace:
    """So many sessions of the kinds, which all begin at once. The same seed gives the same ones."""
    draw = random.Random(seed)
    kinds = draw.choices(range(len(parts)), [part.share for part in parts], k=sessions)
    asks = [ask for number, kind in enumerate(kinds) for ask in _session(parts[kind], kind, number, draw)]
    asks.sort(key=lambda ask: ask.at)
    return Trace("mix", _BLOCK, tuple(asks))


def _session(part: MixPart, kind: int, number: int, draw: random.Random) -> Iterator[RecordedAsk]:
    name = f"{part.name or f'mix{kind}'}-{number}"
    tokens = part.tools + part.system
    keys = tuple(_key(f"{kind}/system/{at}") for at in range(tokens // _BLOCK))
    at, answer = 0.0, 0
    for turn in range(part.turns):
        tokens += answer + _drawn(part.new, part, draw)
        answer = _drawn(part.output, part, draw)
        keys += tuple(_key(f"{name}/{turn}/{more}") for more in range(len(keys), tokens // _BLOCK))
        ask = RecordedAsk(at, tokens, answer, keys, name, took=_TOOK_S, tools=part.tools)
        yield ask
        at += ask.took
        if turn == 0 and part.agents:
            yield from _agents(part, ask, at, draw)
            at += ask.took
        at += part.think * _factor(part, draw)


def _agents(part: MixPart, before: RecordedAsk, at: float, draw: random.Random) -> Iterator[RecordedAsk]:
    for agent in range(1, part.agents + 1):
        tokens = before.tokens + before.output + _drawn(part.new, part, draw)
        own = range(len(before.keys), tokens // _BLOCK)
        keys = (*before.keys, *(_key(f"{before.session}/agent{agent}/{more}") for more in own))
        output = _drawn(part.output, part, draw)
        yield RecordedAsk(at, tokens, output, keys, before.session, took=_TOOK_S, agent=agent, tools=part.tools)


def _drawn(median: int, part: MixPart, draw: random.Random) -> int:
    return max(1, round(median * _factor(part, draw)))


def _factor(part: MixPart, draw: random.Random) -> float:
    return draw.lognormvariate(0.0, part.spread) if part.spread else 1.0


def _key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
