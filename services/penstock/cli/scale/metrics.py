"""What a scrape of the planner says."""

from __future__ import annotations

from penstock.runtime.metrics import Metrics


class ScaleMetrics(Metrics):
    """What `penstock scale` decides, and what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.decisions = self._counter(
            "penstock_scale_decisions", "Actions that were decided on, those of a dry run too", "kind", "role"
        )
        self.failures = self._counter("penstock_scale_failures", "Actions that could not be done", "kind")
        self.wanted = self._gauge("penstock_scale_wanted_workers", "Workers that the load needs", "role")
        self.present = self._gauge("penstock_scale_workers", "Workers that get new work", "role")
        self.starting = self._gauge("penstock_scale_starting_workers", "Workers that were ordered", "role")
        self.met = self._gauge(
            "penstock_scale_targets_met", "Share of the last minute's requests, or tokens, within a target", "target"
        )
        self.blind = self._gauge(
            "penstock_scale_blind_seconds", "Since the mesh was last seen; nothing is decided meanwhile"
        )
