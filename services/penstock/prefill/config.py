"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """A worker that prefills, until it is given another role."""
