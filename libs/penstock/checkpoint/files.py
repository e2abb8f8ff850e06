"""Reading a JSON object from disk, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.checkpoint.errors import CheckpointError

Json = dict[str, Any]


def read_object(file: Path) -> Json:
    """The JSON object in `file`."""
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(file, "the file is missing") from None
    except OSError as error:
        raise CheckpointError(file, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(file, "does not hold a JSON object")
    return value


def read_object_if_there(file: Path) -> Json:
    """The JSON object in `file`, or an empty one when there is no such file."""
    return read_object(file) if file.exists() else {}
