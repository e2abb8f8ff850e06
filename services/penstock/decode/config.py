"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """A worker that decodes, and prefills what the router asks it to, until it is given another role."""

    role: Literal["decode", "both"] = "decode"
    """decode, or both: then the router may give this worker whole requests, prefill included (aggregated mode)."""
