"""What a scrape of the picker says."""

from __future__ import annotations

from penstock.runtime.metrics import Metrics


class PickerMetrics(Metrics):
    """What the endpoint picker tells Envoy."""

    def __init__(self) -> None:
        super().__init__()
        self.picks = self._counter("penstock_picks", "Requests placed at a gateway, or why not", "outcome")
        self.served = self._counter(
            "penstock_picks_served", "Requests that the picked gateway served, or another, where Envoy says so", "by"
        )
