"""Kept inputs: a directory for each parser, seeds made by hand and whatever once broke it."""

from __future__ import annotations

import hashlib
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")


def kept(name: str) -> dict[str, bytes]:
    """The inputs for a parser by the names of their files."""
    return {path.name: path.read_bytes() for path in sorted((CORPUS / name).iterdir())}


def keep(name: str, data: bytes) -> Path:
    """Keeps an input that broke a parser, so that it is tried from now on. Give the file a better name."""
    path = CORPUS / name / f"found-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path
