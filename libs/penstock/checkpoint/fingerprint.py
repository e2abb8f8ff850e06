"""Fingerprints of models and tokenizers, from their bytes: KV computed under one is never used under another."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.checkpoint.directory import Checkpoint, inspect
from penstock.checkpoint.errors import CheckpointError
from penstock.checkpoint.tokenizer_file import tokenizer_file

_CHUNK = 1 << 20
_LATER: dict[str, object] = {
    "sigmoid": False,
    "corrected": False,
    "groups": 1,
    "groups_used": 1,
    "scaling": 1.0,
    "shared_size": 0,
    "weighs_inputs": False,
    "held": None,
    "interleaved": False,
    "latent": None,
    "chunked": False,
    "unrotated": [],
    "key_norm": False,
    "temperature": None,
    "predictors": 0,
    "sections": [],
}
"""Fields that came after "v1": they count where they are set, so that KV that was kept before them stays good."""


def fingerprint(model: str | Path | Checkpoint) -> str:
    """sha256 (hex) of the weights' bytes and of every configuration field that changes what they compute.

    Reads all weights. Two copies of a model under different paths, or with
    different whitespace in config.json, have the same fingerprint; the same weights split into other files have
    another one. Raises CheckpointError.
    """
    checkpoint = model if isinstance(model, Checkpoint) else inspect(model)
    digest = hashlib.sha256(b"penstock model v1")
    fields = _described(asdict(checkpoint.config))
    if checkpoint.quantisation is not None:
        fields["quantisation"] = asdict(checkpoint.quantisation)
    described = json.dumps(fields, sort_keys=True).encode()
    digest.update(len(described).to_bytes(8, "little") + described)
    for file in checkpoint.weight_files:
        add_file(digest, file)
    return digest.hexdigest()


def _described(fields: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            kept[name] = _described(value)
        elif name not in _LATER or (list(value) if isinstance(value, tuple) else value) != _LATER[name]:
            kept[name] = value
    return kept


def tokenizer_fingerprint(model: str | Path | Checkpoint) -> str:
    """sha256 (hex) of tokenizer.json, or of what stands for it (see tokenizer_file). Raises CheckpointError."""
    file = model.tokenizer if isinstance(model, Checkpoint) else tokenizer_file(Path(model))
    digest = hashlib.sha256()
    add_file(digest, file, with_length=False)
    return digest.hexdigest()


def add_file(digest: hashlib._Hash, file: Path, with_length: bool = True) -> None:
    """Adds a file's length and bytes. Raises CheckpointError."""
    try:
        with file.open("rb") as stream:
            if with_length:
                digest.update(file.stat().st_size.to_bytes(8, "little"))
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise CheckpointError(file, f"cannot be read: {error.strerror}") from None
