"""How the bench talks to another engine: a process of its own that answers JSON lines, with nothing else on the wire.

    {"do": "load", ...}\n   ->   {"ok": seconds or values}\n   or   {"error": "why not"}\n

Every peer is one module with a `PeerEngine`; `python -m loadtest.peers.NAME` runs it in the peer's own environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO


class PeerEngine(Protocol):
    """What every peer does. Prompts are lists of token ids."""

    def prepare(self, checkpoint: Path, kind: str) -> None:
        """Makes files of its own format beside the checkpoint (safetensors), where they are missing. Asked for in a
        process of its own."""
        ...

    def load(self, checkpoint: Path, kind: str, *, threads: int, streams: int, tokens: int, room: int) -> None:
        """Loads weights of `kind` (bfloat16 or int8) for up to `streams` sequences of up to `tokens` tokens, `room` in
        all of them together."""
        ...

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from the prompt to its first token. No prompt comes twice, and none may be kept."""
        ...

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        """Seconds for `steps` more greedy tokens of every prompt, all prompts in every step; computing the prompts
        and their first token is not counted, and the KV of prompts may be kept for the next time."""
        ...


def serve(engine: PeerEngine) -> None:
    """Answers until the input ends."""
    wire = take_wire()
    for line in sys.stdin:
        answer(wire, line, lambda values: perform(engine, values))


def perform(engine: PeerEngine, values: dict[str, Any]) -> object:
    """One question. Returns seconds."""
    begin = time.perf_counter()
    match values.pop("do"):
        case "prepare":
            engine.prepare(Path(values["checkpoint"]), values["kind"])
        case "load":
            engine.load(Path(values.pop("checkpoint")), **values)
        case "prefill":
            return engine.prefill(values["prompt"])
        case "decode":
            return engine.decode(values["prompts"], values["steps"])
        case other:
            raise ValueError(f"do must be prepare, load, prefill or decode, not {other!r}")
    return time.perf_counter() - begin


def take_wire() -> TextIO:
    """Standard output for answers alone: what libraries print goes to standard error."""
    wire = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return wire


def answer(wire: TextIO, line: str, act: Callable[[dict[str, Any]], object]) -> None:
    """Answers one line. A question that fails leaves the engine as it is; the asker decides."""
    try:
        found: dict[str, object] = {"ok": act(json.loads(line))}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:2000]}
    wire.write(json.dumps(found) + "\n")
    wire.flush()
