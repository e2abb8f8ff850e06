"""A peer that measures nothing: `python fake_peer.py`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from loadtest.peers.protocol import serve


class Fake:
    def prepare(self, checkpoint: Path, kind: str) -> None:
        (checkpoint / kind).write_text("prepared")

    def load(self, checkpoint: Path, kind: str, *, threads: int, streams: int, tokens: int, room: int) -> None:
        print("a library's banner on standard output")
        self.kind = kind

    def prefill(self, prompt: Sequence[int]) -> float:
        if not prompt:
            os._exit(7)
        return 0.25 * len(prompt)

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        raise RuntimeError(f"{len(prompts)} streams are too many")


if __name__ == "__main__":
    serve(Fake())
