"""What every server of a peer is told."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """One server on 127.0.0.1."""

    model: Path
    """The checkpoint, a Hugging Face directory."""
    port: int
    threads: int
    streams: int
    """Sequences at one time, at most."""
    tokens: int
    """Of one sequence, at most."""
    room: int
    """Tokens of all sequences whose keys and values are kept."""
    draft: Path | None = None
    """A smaller checkpoint with the same tokens, for speculation."""
    lookup: bool = False
    """Whether text is looked up for speculation."""


def read(description: str | None) -> ServerOptions:
    """From the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True)
    for name in ("port", "threads", "streams", "tokens", "room"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--lookup", action="store_true")
    return ServerOptions(**vars(parser.parse_args()))
