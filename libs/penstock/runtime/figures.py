"""Figures that data structures report of themselves: what they mean, and how they are read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class Scraped:
    """One of them."""

    what: str
    total: bool = False
    """It only grows, and so is a counter."""


def _total(what: str) -> Scraped:
    return Scraped(what, total=True)


STORE: Mapping[str, Scraped] = {
    "slots": Scraped("Places for blocks in host memory"),
    "blocks": Scraped("Blocks in host memory"),
    "reserved": Scraped("Slots into which a worker copies a block"),
    "detached": Scraped("Quarantined blocks that are still leased"),
    "cooling": Scraped("Slots that rest, because a late write into them can't be excluded"),
    "used_bytes": Scraped("Bytes of host memory in blocks, reservations and what is detached"),
    "leases": Scraped("Leases of blocks"),
    "attachments": Scraped("Attached clients"),
    "hits": _total("Blocks that were leased"),
    "misses": _total("Blocks that were asked for and not found"),
    "puts": _total("Blocks that were committed"),
    "brought": _total("Blocks that came up from slower tiers"),
    "evictions": _total("Blocks that left host memory because others needed their slots"),
    "quarantined": _total("Blocks that were not what their checksum says"),
    "refused_commits": _total("Commits of reservations that were over"),
    "expired_leases": _total("Leases that nobody released in time"),
    "expired_reservations": _total("Reservations that nobody committed in time"),
    "retained": Scraped("Blocks that somebody was promised"),
    "lent": Scraped("Blocks that workers have in pages of their own"),
    "lent_torn": _total("Copies from such pages that were wrong"),
    "lent_rescued": _total("Blocks that were copied from such pages before they left"),
    "claims": Scraped("Claims of workers that compute blocks"),
    "claimed_blocks": Scraped("Blocks that are being computed under claims"),
    "claim_waits": Scraped("Requests that wait for claimed blocks"),
    "pulled_blocks": _total("Blocks that came from other stores"),
    "pulled_bytes": _total("Bytes that came from other stores"),
    "resumed_bytes": _total("Bytes that had come when a stream broke, and were not sent again"),
    "pull_seconds": _total("Seconds that fetches from other stores took"),
    "resumptions": _total("Fetches from other stores that went on after a break"),
    "refused_sources": _total("Addresses in requests that are no stores of this mesh"),
    "homes_asked": _total("Questions to other stores who has a block"),
    "homes_knew": _total("Questions to other stores who has a block that one could answer"),
    "pool_blocks": _total("Blocks that came from a shared pool"),
    "pool_published": _total("Blocks that were put into the shared pool"),
    "pool_left_out": _total("Blocks that were not put there for lack of time or room"),
    "nvme_slots": Scraped("Places for blocks on the disk"),
    "nvme_blocks": Scraped("Blocks on the disk"),
    "nvme_used_bytes": Scraped("Bytes of blocks on the disk"),
    "nvme_read_blocks": _total("Blocks that were read from the disk"),
    "nvme_read_bytes": _total("Bytes that were read from the disk"),
    "nvme_written_blocks": _total("Blocks that were written to the disk"),
    "nvme_written_bytes": _total("Bytes that were written to the disk"),
    "nvme_evictions": _total("Blocks that left the disk because others needed their slots"),
    "nvme_torn": _total("Slots without a whole header, dropped"),
    "nvme_corrupt": _total("Blocks that were not what their checksum says, dropped"),
    "nvme_stale": _total("Blocks that were written again elsewhere, dropped"),
    "nvme_foreign": _total("Blocks of another spec or version, dropped"),
    "nvme_unreadable": _total("Blocks that could not be read"),
    "nvme_read_failures": _total("Times that reading was given up for a while"),
    "nvme_write_failures": _total("Times that writing was given up for a while"),
    "nvme_reading": Scraped("1: the disk is read; 0: it is left alone for now, or there is none"),
    "nvme_writing": Scraped("1: the disk is written; 0: it is left alone for now, or there is none"),
    "nvme_direct": Scraped("1: beside the page cache"),
    "nvme_written_today": Scraped("Bytes of today's write budget that are used"),
    "nvme_refused": _total("Blocks for which nothing could be evicted"),
    "nvme_pending": Scraped("Blocks that are to be written"),
    "nvme_waiting": Scraped("Blocks that have not earned the disk yet"),
    "nvme_prefetched": _total("Times that blocks were brought before their session came back"),
}
"""Of a store, but for its device: host memory, the disk (`nvme_`) and other stores."""

GPU: Mapping[str, Scraped] = {
    "arena_bytes": Scraped("Bytes of the tier on the device"),
    "slots": Scraped("Places for blocks on the device"),
    "blocks": Scraped("Blocks on the device"),
    "used_bytes": Scraped("Bytes of blocks on the device"),
    "leases": Scraped("Leases of blocks on the device"),
    "hits": _total("Blocks that were leased on the device"),
    "promoted": _total("Blocks that were copied up"),
    "demoted": _total("Only copies that came down when they had to leave"),
    "supplied": _total("Blocks that were brought to host memory for a lease"),
    "evictions": _total("Blocks that left the device because others needed their slots"),
    "failed_copies": _total("Copies that failed"),
    "corrupt": _total("Blocks that were wrong after a copy"),
    "off": Scraped("1: the tier has turned itself off"),
}
"""Of a store's device."""


class FigureCollector(Collector):
    """Figures of a data structure, read at each scrape."""

    def __init__(
        self,
        prefix: str,
        read: Callable[[], Mapping[str, float]],
        declared: Mapping[str, Scraped],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Of what `read` gives, those that are declared; `labels` are for those of vLLM's names."""
        self._prefix = prefix
        self._read = read
        self._declared = declared
        self._labels = labels or {}

    def collect(self) -> Iterator[Metric]:
        """One family for each figure."""
        for name, value in self._read().items():
            figure, full = self._declared[name], self._prefix + name
            labels = self._labels if full.startswith("vllm:") else {}
            family = (CounterMetricFamily if figure.total else GaugeMetricFamily)(full, figure.what, labels=[*labels])
            family.add_metric([*labels.values()], value)
            yield family


class LabelCollector(Collector):
    """Counters, or gauges, with one label that varies, read at each scrape."""

    def __init__(
        self,
        name: str,
        what: str,
        label: str,
        read: Callable[[], Mapping[str, int]],
        labels: Mapping[str, str] | None = None,
        *,
        total: bool = True,
    ) -> None:
        """`labels` come before the one that varies."""
        self._name, self._what, self._label, self._read = name, what, label, read
        self._labels, self._total = labels or {}, total

    def collect(self) -> Iterator[Metric]:
        """One family."""
        labels = [*self._labels, self._label]
        family = (CounterMetricFamily if self._total else GaugeMetricFamily)(self._name, self._what, labels=labels)
        for value, count in self._read().items():
            family.add_metric([*self._labels.values(), value], count)
        yield family
