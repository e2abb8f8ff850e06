"""Which faults a soak injects: drawn by a seed, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FaultAct = Literal["kill", "short", "medium", "long"]
"""SIGKILL, or SIGSTOP: for less than anybody minds, for longer than a worker may be silent, and until the supervisor
kills who does not answer."""
_ACTS: dict[FaultAct, int] = {"kill": 5, "short": 2, "medium": 2, "long": 1}
"""Of every ten faults."""
_HOLDS_S: dict[FaultAct, tuple[float, float]] = {
    "kill": (0.0, 0.0),
    "short": (0.2, 1.2),
    "medium": (2.3, 3.2),
    "long": (8.0, 9.0),
}
_SERVICES = {"decode": 4, "prefill": 3, "router": 2, "gateway": 2, "kvstore": 2, "draft": 2, "redis": 1}
"""How often one of each kind is struck, beside others."""
_ALONE = ("gateway", "router")
"""Of these one is down at a time: clients and gateways have to find another."""


@dataclass(frozen=True, slots=True)
class SoakFault:
    """Who is struck, and how."""

    service: str
    """By its name, such as decode-0."""
    act: FaultAct
    hold_s: float
    """For how long it stands still; 0 of a kill."""
    after_s: float
    """Since the fault before."""


class FaultPlan:
    """Draws one fault after the other."""

    def __init__(self, services: Sequence[str], seed: int, every_s: float) -> None:
        self._source = random.Random(f"faults {seed}")
        self._every_s = every_s
        self._by_kind: dict[str, list[str]] = {}
        for service in sorted(services):
            self._by_kind.setdefault(kind_of(service), []).append(service)

    def next(self, *, sparing: bool) -> SoakFault:
        """The next one. With `sparing` the first of each kind is only struck so that it lives on: some processes get
        old."""
        source, kinds = self._source, list(self._by_kind)
        kind = source.choices(kinds, [_SERVICES[kind] for kind in kinds])[0]
        service = source.choice(self._by_kind[kind])
        act = source.choices(list(_ACTS), list(_ACTS.values()))[0]
        if sparing and service == self._by_kind[kind][0]:
            act = "short"
        hold_s = source.uniform(*_HOLDS_S[act])
        return SoakFault(service, act, hold_s, source.uniform(0.5, 1.5) * self._every_s)


def kind_of(service: str) -> str:
    """decode, of decode-0."""
    return service.partition("-")[0]


def needed_beside(service: str, services: Sequence[str]) -> list[str]:
    """Who has to be there when that service is struck."""
    kind = kind_of(service)
    return [other for other in services if kind in _ALONE and kind_of(other) == kind and other != service]
