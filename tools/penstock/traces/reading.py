"""Recorded requests as chains of block keys.

Three formats, all as JSON lines, gzipped when the name ends in .gz:

- with `hash_ids` (Mooncake's traces, and others in their format): the ids of a prompt's blocks, each of which names
  the whole prompt up to its end; `timestamp` in ms, `input_length` and `output_length` in tokens, and perhaps
  `block_size` (512 if not given) and `session`;
- with `input` and `output` (LMCache's agent traces): texts, `timestamp` in us, `session_id`. Four characters stand
  for a token, and blocks have 16 tokens;
- with `requests` (coding agents' sessions, a line each): `session`, `block_size`, `tool_tokens`, `system_tokens`, and
  of each request its time in seconds, tokens of input and output, blocks, how many of them an earlier request of the
  session has too, and that one's number or -1; perhaps also which agent of the session asked, how its answer ended, the
  think time before it and how long it took. All sessions begin at the same time, and with the same tools and system
  prompt, as far as each has them.

A table of lengths alone (Azure's CSV files) says nothing about reuse: `load` refuses it, `load_lengths` reads it.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
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
    took: float = 0.0
    """Seconds until its answer had come; 0 where the trace doesn't say."""
    agent: int = 0
    """Which of the session's agents asked: 0 is the main one, the others are its sub-agents."""
    tools: int = 0
    """Tokens at the beginning of the prompt that define tools."""
    calls_tool: bool = False
    """Whether the answer was a call of a tool."""


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


@dataclass(frozen=True, slots=True)
class RecordedTexts:
    """What one recorded request said and was answered."""

    session: str
    input: str
    output: str


def texts(path: Path) -> list[RecordedTexts]:
    """Reads a trace with texts, in the order of its times. Raises TraceError."""
    try:
        rows = sorted(_rows(path), key=lambda row: row["timestamp"])
        return [RecordedTexts(str(row.get("session_id", "")), row["input"], row["output"]) for row in rows]
    except (KeyError, TypeError) as error:
        raise TraceError(f"no texts in it: {error!r}") from None


def load(path: Path) -> Trace:
    """Reads a trace. Raises TraceError."""
    rows = _rows(path)
    try:
        read = _from_ids if "hash_ids" in rows[0] else _from_sessions if "requests" in rows[0] else _from_text
        block, asks = read(rows)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise TraceError(f"neither hash_ids, nor input and output, nor requests: {error!r}") from None
    asks.sort(key=lambda ask: ask.at)
    first = asks[0].at
    moved = (replace(ask, at=ask.at - first) for ask in asks)
    trace = Trace(path.name.split(".")[0], block, tuple(moved))
    _check_chains(path, trace)
    return trace


def load_lengths(path: Path) -> Trace:
    """Reads a table of requests that have nothing in common, with the columns TIMESTAMP, ContextTokens and
    GeneratedTokens, as Azure publishes them. Raises TraceError."""
    try:
        with _opened(path) as lines:
            asks = [
                RecordedAsk(
                    datetime.fromisoformat(row["TIMESTAMP"].strip()).timestamp(),
                    max(1, int(row["ContextTokens"])),
                    max(_LEAST_OUTPUT, int(row["GeneratedTokens"])),
                    (),
                    "",
                )
                for row in csv.DictReader(lines)
            ]
    except FileNotFoundError:
        raise TraceError("no such file") from None
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise TraceError(f"not a table of TIMESTAMP, ContextTokens and GeneratedTokens: {error!r}") from None
    if not asks:
        raise TraceError("no request in it")
    asks.sort(key=lambda ask: ask.at)
    first = asks[0].at
    return Trace(path.name.split(".")[0], _BLOCK, tuple(replace(ask, at=ask.at - first) for ask in asks))


def _rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a trace, at least one."""
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
    return rows


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


def _from_sessions(rows: Iterable[dict[str, Any]]) -> tuple[int, list[RecordedAsk]]:
    asks: list[RecordedAsk] = []
    block = _BLOCK
    common: list[bytes] = []
    for row in rows:
        block, name = row["block_size"], str(row["session"])
        tools = row["tool_tokens"]
        begins = (tools + row["system_tokens"]) // block
        common += [_key(b"common/%d" % number) for number in range(len(common), begins)]
        session: list[RecordedAsk] = []
        for number, (at, tokens, output, blocks, shared, shared_with, *more) in enumerate(row["requests"]):
            agent, stop, _, took = more if more else (0, "", 0, 0)
            before = session[shared_with].keys[:shared] if shared_with >= 0 else tuple(common[: min(begins, blocks)])
            own = (_key(b"%s/%d/%d" % (name.encode(), number, at)) for at in range(len(before), blocks))
            session.append(
                RecordedAsk(
                    at,
                    tokens,
                    max(_LEAST_OUTPUT, output),
                    (*before, *own),
                    name,
                    took=took,
                    agent=agent,
                    tools=min(tools, tokens),
                    calls_tool=stop == "tool_use",
                )
            )
        asks += session
    return block, asks


def _key(name: bytes) -> bytes:
    return hashlib.sha256(name).digest()


def _text_keys(text: str) -> Iterator[bytes]:
    key, size = ROOT, _TEXT_BLOCK * _CHARACTERS_PER_TOKEN
    for start in range(0, len(text), size):
        key = hashlib.sha256(key + text[start : start + size].encode()).digest()
        yield key


def _check_chains(path: Path, trace: Trace) -> None:
    parents: dict[bytes, bytes] = {}
    for ask in trace.asks:
        for at in range(len(ask.keys) - 1, -1, -1):
            key, parent = ask.keys[at], ask.keys[at - 1] if at else ROOT
            if key not in parents:
                parents[key] = parent
            elif parents[key] != parent:
                raise TraceError("a block id follows two different ones, so ids don't name whole prefixes")
            else:
                break  # it was looked at before, with all blocks in front of it
