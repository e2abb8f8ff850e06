"""Small traces, and a player of them in the test's own process."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.load.planning import LoadPlan, Playing, planned
from penstock.load.playing import SessionsPlayer
from penstock.load.records import LoadRecord
from penstock.load.target import LoadTarget, parsed
from penstock.load.wording import Wording
from penstock.traces.reading import RecordedAsk, Trace

BLOCK = 4
WORDING = Wording(salt="test", words_per_token=0.5, tool_tokens=20.0)


def key(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def keys(*names: str) -> tuple[bytes, ...]:
    return tuple(map(key, names))


def single(at: float, *names: str, output: int = 2) -> RecordedAsk:
    """A request without a session, of whole blocks."""
    return RecordedAsk(at, BLOCK * len(names), output, keys(*names), "")


def chain(name: str, *turns: tuple[float, int], think: float = 1.0, output: int = 2) -> list[RecordedAsk]:
    """A session: of each turn how long its answer took, and how many blocks it has."""
    at, asks = 0.0, []
    for took, blocks in turns:
        names = keys(*(f"{name}{number}" for number in range(blocks)))
        asks.append(RecordedAsk(at, blocks * BLOCK, output, names, name, took=took))
        at += took + think
    return asks


def trace(*asks: RecordedAsk) -> Trace:
    return Trace("t", BLOCK, tuple(sorted(asks, key=lambda ask: ask.at)))


def plan(*asks: RecordedAsk, **playing: Any) -> LoadPlan:
    return planned(trace(*asks), Playing(**playing))


def target(url: str, **more: Any) -> LoadTarget:
    host, port, tls, prefix = parsed(url)
    return LoadTarget(host=host, port=port, tls=tls, prefix=prefix, **{"model": "fake"} | more)


async def play(url: str, played: LoadPlan, *, more: dict[str, Any] | None = None, **options: Any) -> list[LoadRecord]:
    """The requests, as they ended. `more`: of the target."""
    records: list[LoadRecord] = []
    player = SessionsPlayer(target(url, **(more or {})), WORDING, records.append, **options)
    await player.play(played.sessions, player.clock.now())
    return records


def mooncake(path: Path, rows: Sequence[tuple[int, int, int, Sequence[int]]]) -> Path:
    """A file of timestamps in ms, lengths and ids of blocks."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def record(**fields: Any) -> LoadRecord:
    """An answered request: due at 0, first token after 1 s, 4 more at intervals of 0.5 s."""
    defaults: dict[str, Any] = {
        "round": 0, "process": 0, "session": "s", "turn": 0, "agent": 0, "number": 1, "scheduled": 0.0, "sent": 0.0,
        "first": 1.0, "last": 3.0, "ended": 3.0, "gaps": [0.5] * 4, "status": 200, "finish": "length",
        "prompt_tokens": 100, "output_tokens": 5, "planned_tokens": 100, "reusable": 50,
    }  # fmt: skip
    return LoadRecord(**defaults | fields)


def failed(**fields: Any) -> LoadRecord:
    return record(
        first=None, last=None, gaps=[], error="Refused", status=500, message="no", output_tokens=None, **fields
    )
