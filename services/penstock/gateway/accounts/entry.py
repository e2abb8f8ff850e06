"""What is written down of requests: counts by hour, tenant and model, that only ever grow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from penstock.gateway.request.work import TIERS

HOUR_S = 3600
NANO = 1_000_000_000


class LedgerLine(NamedTuple):
    """Whose counts they are."""

    hour: int
    """Unix seconds at which the hour begins."""
    tenant: str
    model: str


@dataclass(slots=True)
class Counts:
    """Sums over requests. `input_tokens` is computed plus all cached ones, as the workers counted them."""

    requests: int = 0
    input_tokens: int = 0
    computed_tokens: int = 0
    cached_worker: int = 0
    cached_gpu: int = 0
    cached_host: int = 0
    cached_nvme: int = 0
    cached_remote: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cost_nano: int = 0
    """Billionths of the currency, so that sums are exact."""

    def add(self, other: Counts) -> None:
        """Adds each count."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


COUNTS = tuple(field.name for field in fields(Counts))
Entries = Mapping[LedgerLine, Counts]


def of_request(computed: int, cached: Mapping[str, int], output: int, *, reasoning: int) -> Counts:
    """The counts of one request; its cost is the ledger's to say."""
    by_tier = {f"cached_{tier}": cached.get(tier, 0) for tier in TIERS}
    return Counts(
        requests=1,
        input_tokens=computed + sum(by_tier.values()),
        computed_tokens=computed,
        output_tokens=output,
        reasoning_tokens=reasoning,
        **by_tier,
    )


def merged(*many: Iterable[tuple[LedgerLine, Counts]]) -> dict[LedgerLine, Counts]:
    """Sums by account."""
    found: dict[LedgerLine, Counts] = {}
    for entries in many:
        for account, counts in entries:
            found.setdefault(account, Counts()).add(counts)
    return found
