"""The model that all servers serve: random weights of a shape, and a tokenizer that knows every token."""

from __future__ import annotations

import json
import os
from pathlib import Path

from penstock.bench.engine.shapes import LlamaShape, checkpoint
from penstock.testing.checkpoints import SPECIALS


def served(shape: LlamaShape, place: Path) -> Path:
    """A directory under `place` with the weights of `engine.shapes.checkpoint`; made when it is missing.

    Its tokenizer gives every token of the vocabulary a text of its own, so that all servers turn tokens into text.
    """
    plain = checkpoint(shape, place)
    directory = place / f"served-{shape.name}"
    directory.mkdir(exist_ok=True)
    for file in plain.iterdir():
        if file.is_file() and not (directory / file.name).exists():
            os.link(file, directory / file.name)
    tokenizer = json.loads((plain / "tokenizer.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    first = 256 + len(SPECIALS)
    vocab |= {f"\u0120w{number}": number for number in range(first, shape.vocab)}  # \u0120 stands for a space
    part = directory / f"tokenizer.json.{os.getpid()}"
    part.write_text(json.dumps(tokenizer))
    part.replace(directory / "tokenizer.json")
    return directory
