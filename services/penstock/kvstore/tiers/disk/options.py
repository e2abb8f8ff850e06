"""What an operator says of the disk tier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeOptions:
    """Where blocks go, and how many bytes in all, per second and per day."""

    directory: Path
    total: int
    per_s: int
    per_day: int
    direct: bool = True
