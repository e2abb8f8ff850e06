"""Every metric of every service, as the code declares it, and the table of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.registry import CollectorRegistry

from penstock.cli.scale.metrics import ScaleMetrics
from penstock.picker.metrics import PickerMetrics
from penstock.runtime.drafts import DraftAccount
from penstock.runtime.figures import GPU, STORE
from penstock.runtime.metrics import (
    DraftMetrics,
    GatewayMetrics,
    PartitionFigures,
    RouterMetrics,
    StoreMetrics,
    WorkerMetrics,
)
from penstock.runtime.request_metrics import STEP_TOKENS
from penstock.runtime.token_metrics import TokenBuckets
from penstock.stage.metrics import StageMetrics

_HEAD = """# Metrics

Made by `make boards` from the code that exports them; tests compare. [Observing a mesh](observing.md) says how to read
them. A counter's name ends in `_total`; a histogram has `_bucket`, `_sum` and `_count`. Names that begin with `vllm:`
mean what they mean there.
"""


@dataclass(frozen=True, slots=True)
class ExportedFamily:
    """A metric: its samples differ in the values of its labels."""

    name: str
    """Without what is put behind it."""
    kind: str
    """counter, gauge or histogram."""
    labels: tuple[str, ...]
    what: str

    @property
    def samples(self) -> tuple[str, ...]:
        """The names that queries use."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (f"{self.name}_total" if self.kind == "counter" else self.name,)


def catalogue() -> Mapping[str, list[ExportedFamily]]:
    """The families of each service, in alphabetical order."""
    worker = WorkerMetrics("")
    worker.watch(lambda: dict.fromkeys(WorkerMetrics.FIGURES, 0.0))
    worker.watch_drafts(DraftAccount)
    worker.watch_steps(TokenBuckets(STEP_TOKENS), dict)
    worker.describe(block_size=0, pages=0, dtype="")
    store, part = (
        StoreMetrics(),
        PartitionFigures(model="", slots=0, blocks=0, hits=0, misses=0, evictions=0, attachments=0),
    )
    store.watch(lambda: dict.fromkeys(STORE, 0.0), dict, lambda: dict.fromkeys(GPU, 0.0), lambda: {0: part})
    draft = DraftMetrics()
    draft.watch(lambda: dict.fromkeys(DraftMetrics.FIGURES, 0.0), dict)
    kinds = {
        "gateway": GatewayMetrics(),
        "router": RouterMetrics(),
        "prefill, decode": worker,
        "kvstore": store,
        "draft": draft,
        "stage": StageMetrics(),
        "picker": PickerMetrics(),
        "scale": ScaleMetrics(),
    }
    return {service: sorted(_families(found.registry), key=lambda one: one.name) for service, found in kinds.items()}


def _families(registry: CollectorRegistry) -> Iterator[ExportedFamily]:
    """Labels are no part of prometheus_client's public types: without samples only its own attribute tells them."""
    for collector in registry._collector_to_names:
        labels = getattr(collector, "_labelnames", None)
        for family in collector.collect():
            found = getattr(family, "_labelnames", ()) if labels is None else labels
            yield ExportedFamily(family.name, family.type, tuple(found), family.documentation)


def document() -> str:
    """The whole document."""
    parts = [_HEAD]
    for service, families in catalogue().items():
        parts.append(f"\n## {service}\n\n| metric | kind | labels | what |\n|---|---|---|---|\n")
        for one in families:
            name = one.samples[0] if one.kind == "counter" else one.name
            labels = ", ".join(f"`{label}`" for label in one.labels)
            parts.append(f"| `{name}` | {one.kind} | {labels} | {one.what} |\n")
    return "".join(parts)
