"""Recorded requests as chains of block keys.

Two formats, both as JSON lines, gzipped when the name ends in .gz:

- with `hash_ids` (Mooncake's traces, and others in their format): the ids of a prompt's blocks, each of which names
  the whole prompt up to its end; `timestamp` in ms, `input_length` and `output_length` in tokens, and perhaps
  `block_size` (512 if not given) and `session`;
- with `input` and `output` (LMCache's agent traces): texts, `timestamp` in us, `session_id`. Four characters stand
  for a token, and blocks have 16 tokens.

A table of lengths alone (Azure's CSV files) says nothing about reuse and is refused.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from penstock.kv.identity import KEY_BYTES

ROOT = bytes(KEY_BYTES)
_CHARACTERS_PER_TOKEN = 4
_TEXT_BLOCK = 16
_BLOCK = 512
_LEAST_OUTPUT = 1


class TraceError(ValueError):
    """A trace that can't be replayed; the text says why."""


@dataclass(frozen=True, slots=True)
class RecordedAsk:
    """One recorded request."""

    at: float
    """Seconds since the first one."""
    tokens: int
    """Length of the prompt."""
    output: int
    keys: tuple[bytes, ...]
    """Keys of its blocks: whole ones and, where the trace has it, the partial last one."""
    session: str
    """Empty where the trace doesn't say."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded workload."""

    name: str
    block_tokens: int
    asks: tuple[RecordedAsk, ...]

    @property
    def blocks(self) -> int:
        """Number of distinct blocks."""
        return len(set(chain.from_iterable(ask.keys for ask in self.asks)))

    @property
    def has_sessions(self) -> bool:
        """Whether it says which requests belong together."""
        return any(ask.session for ask in self.asks)


def overlaid(trace: Trace) -> Trace:
    """The same sessions, but they begin one shortly after the other, so that many run at once.

    Each keeps its own pace. Their beginnings are spread evenly over the mean length of a session. For traces that
    were recorded one session after the other, as agent benchmarks are.
    """
    talks: dict[str, list[RecordedAsk]] = {}
    for ask in trace.asks:
        talks.setdefault(ask.session, []).append(ask)
    length = sum(asks[-1].at - asks[0].at for asks in talks.values()) / len(talks)
    moved = [
        replace(ask, at=ask.at - asks[0].at + number * length / len(talks))
        for number, asks in enumerate(talks.values())
        for ask in asks
    ]
    moved.sort(key=lambda ask: ask.at)
    return Trace(f"{trace.name}, overlaid", trace.block_tokens, tuple(moved))


def load(path: Path) -> Trace:
    """Reads a trace. Raises TraceError."""
    try:
        with _opened(path) as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
    except FileNotFoundError:
        raise TraceError("no such file") from None
    except (OSError, ValueError) as error:
        if path.name.endswith((".csv", ".csv.gz")):
            raise TraceError("a table of lengths: without block ids nothing is known of reuse") from None
        raise TraceError(f"not JSON lines: {error}") from None
    if not rows:
        raise TraceError("no request in it")
    try:
        block, asks = _from_ids(rows) if "hash_ids" in rows[0] else _from_text(rows)
    except (KeyError, TypeError) as error:
        raise TraceError(f"neither hash_ids nor input and output: {error!r}") from None
    asks.sort(key=lambda ask: ask.at)
    first = asks[0].at
    moved = (RecordedAsk(ask.at - first, ask.tokens, ask.output, ask.keys, ask.session) for ask in asks)
    trace = Trace(path.name.split(".")[0], block, tuple(moved))
    _check_chains(path, trace)
    return trace


def _opened(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="utf-8") if path.name.endswith(".gz") else open(path, encoding="utf-8")


def _from_ids(rows: Iterable[dict[str, Any]]) -> tuple[int, list[RecordedAsk]]:
    keys: dict[int, bytes] = {}
    asks = []
    block = _BLOCK
    for row in rows:
        block = row.get("block_size", _BLOCK)
        names = tuple(keys.setdefault(one, hashlib.sha256(b"%d" % one).digest()) for one in row["hash_ids"])
        session = str(row.get("session", ""))
        asks.append(RecordedAsk(row["timestamp"] / 1e3, row["input_length"], row["output_length"], names, session))
    return block, asks


def _from_text(rows: Iterable[dict[str, Any]]) -> tuple[int, list[RecordedAsk]]:
    asks = []
    for row in rows:
        text, output = row["input"], len(row["output"]) // _CHARACTERS_PER_TOKEN
        tokens = -(-len(text) // _CHARACTERS_PER_TOKEN)
        session = str(row.get("session_id", ""))
        keys = tuple(_text_keys(text))
        asks.append(RecordedAsk(row["timestamp"] / 1e6, tokens, max(_LEAST_OUTPUT, output), keys, session))
    return _TEXT_BLOCK, asks


def _text_keys(text: str) -> Iterator[bytes]:
    key, size = ROOT, _TEXT_BLOCK * _CHARACTERS_PER_TOKEN
    for start in range(0, len(text), size):
        key = hashlib.sha256(key + text[start : start + size].encode()).digest()
        yield key


def _check_chains(path: Path, trace: Trace) -> None:
    parents: dict[bytes, bytes] = {}
    for ask in trace.asks:
        for parent, key in pairwise((ROOT, *ask.keys)):
            if parents.setdefault(key, parent) != parent:
                raise TraceError("a block id follows two different ones, so ids don't name whole prefixes")
