"""The one error of this package."""

from __future__ import annotations

from pathlib import Path


class CheckpointError(Exception):
    """The directory cannot be served: `file` is where the fault lies, `reason` is a sentence for the operator."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason
