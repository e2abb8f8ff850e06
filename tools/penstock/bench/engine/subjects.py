"""The engines that are measured: our engine and the peers, how each is started, and what it needs."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.engine.process import Failed, Talk, started

OURS = "penstock"
PEERS = ("llamacpp", "openvino", "transformers", "vllm")
_WIDTHS = {"openvino": 1.1, "transformers": 2.0, "vllm": 3.5}
"""Measured on a processor without bfloat16."""
_CONVERSION_S = 900.0
_ROOT = Path(__file__).parents[4]
"""The checkout, which holds loadtest/."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine with weights of one kind."""

    engine: str
    """`OURS` or one of `PEERS`."""
    kind: str = "bfloat16"
    """bfloat16, int8, int4, or ours alone: lossless, and torch, which is bfloat16 without kernels."""

    @property
    def name(self) -> str:
        return self.engine if self.kind == "bfloat16" else f"{self.engine} {self.kind}"

    @property
    def memory(self) -> float:
        """Its memory as a multiple of the bfloat16 weights, at most: some engines also keep float32 copies."""
        return {"int8": 0.6, "int4": 0.4, "lossless": 0.8}.get(self.kind, 1.0) * _WIDTHS.get(self.engine, 1.0)


@dataclass(frozen=True, slots=True)
class Needs:
    """The most that any cell asks of an engine that is loaded once."""

    streams: int
    tokens: int
    """Of one sequence."""
    room: int
    """Tokens of all sequences of a cell."""


class Places:
    """Where peers' environments and the checkpoints are."""

    def __init__(self, directory: Path) -> None:
        self.peers = directory
        self.models = directory / "models"

    @classmethod
    def default(cls) -> Places:
        """$PENSTOCK_PEERS, as loadtest/peers/install.py has it, else runs/peers."""
        return cls(Path(os.environ.get("PENSTOCK_PEERS") or _ROOT / "runs" / "peers"))

    def interpreter(self, peer: str) -> Path:
        """The Python of the peer's environment. Raises Failed when there is none."""
        found = self.peers / peer / "bin" / "python"
        if not (_ROOT / "loadtest" / "peers").is_dir():
            raise Failed(f"there is no loadtest/peers in {_ROOT}: peers run from a checkout")
        if not found.exists():
            raise Failed(f"not installed: python -m loadtest.peers.install {peer}")
        return found


@asynccontextmanager
async def running(subject: Subject, places: Places) -> AsyncIterator[Talk]:
    """The subject's process, with nothing loaded. Raises Failed."""
    command: Sequence[str | Path]
    if subject.engine == OURS:
        command = (sys.executable, "-P", Path(__file__).parent / "ours.py")
        environment = dict(os.environ)
    else:
        command = (places.interpreter(subject.engine), "-m", f"loadtest.peers.{subject.engine}")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    async with started(command, _ROOT, environment) as talk:
        yield talk


async def prepare(subject: Subject, places: Places, checkpoint: Path) -> None:
    """Has a peer convert the checkpoint, if it has not yet. Raises Failed."""
    if subject.engine == OURS:
        return
    async with running(subject, places) as talk:
        await talk.ask("prepare", _CONVERSION_S, checkpoint=str(checkpoint), kind=subject.kind)
