"""Finds a model by its name on the Hugging Face hub: in this user's cache, else by a download."""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.checkpoint import CheckpointError, inspect
from penstock.models import NAMES, embedded
from penstock.runtime.config import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_FILES = ("*.json", "*.safetensors", "*.jinja")
"""What is read of a model; a download takes nothing else, above all no code."""


def fetch(field: str, chosen: str) -> None:
    """Downloads ORG/NAME when it is not here, with progress bars on standard error. Raises ConfigError."""
    if _is_name(chosen) and _cached(chosen) is None:
        _download(field, chosen)


def model_directory(field: str, chosen: str) -> Path:
    """The directory of an embedded model, of a path, or of ORG/NAME in the cache. Raises ConfigError."""
    directory = embedded(chosen) if chosen in NAMES else Path(chosen).expanduser()
    if _is_name(chosen):
        cached = _cached(chosen)
        if cached is None:
            raise ConfigError(field, chosen, "is not in the cache of Hugging Face models")
        directory = cached
    elif not directory.is_dir():
        right = (
            f"is no directory and no embedded model ({', '.join(NAMES)}); give the directory of a Hugging Face model in"
            " safetensors, or its name as ORG/NAME"
        )
        raise ConfigError(field, chosen, right)
    try:
        inspect(directory)
    except CheckpointError as error:
        raise ConfigError(field, chosen, str(error)) from error
    return directory.resolve()


def public_name(chosen: str) -> str:
    """The name by which clients ask for the model."""
    return chosen if chosen in NAMES or _is_name(chosen) else Path(chosen).expanduser().resolve().name


def _is_name(chosen: str) -> bool:
    return _NAME.fullmatch(chosen) is not None and not Path(chosen).is_dir()


def _download(field: str, name: str) -> None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        right = (
            f"is no directory and not in the cache of Hugging Face models ({_cache()}); to download it, first"
            " `pip install 'penstock[hub]'`"
        )
        raise ConfigError(field, name, right) from None
    try:
        snapshot_download(name, allow_patterns=list(_FILES), cache_dir=_cache())
    except Exception as error:  # the hub raises its own errors, those of HTTP and those of the system
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        right = f"is no directory, not in the cache of Hugging Face models, and cannot be downloaded: {reason}"
        raise ConfigError(field, name, right) from None


def _cached(name: str) -> Path | None:
    """The snapshot of the main branch, as it was when it was downloaded; None where it is missing or not whole."""
    home = _cache() / f"models--{name.replace('/', '--')}"
    try:
        revision = (home / "refs" / "main").read_text().strip()
    except OSError:
        return None
    found = home / "snapshots" / revision
    return found if re.fullmatch(r"\w+", revision) and _whole(found) else None


def _whole(directory: Path) -> bool:
    try:
        inspect(directory)
    except CheckpointError:
        return False
    return True


def _cache() -> Path:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
