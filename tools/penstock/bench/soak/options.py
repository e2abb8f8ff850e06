"""How long a soak is, and how hard."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """All that a run depends on. The defaults are those of the long one."""

    requests: int = 50_000
    """Of live clients, calm ones too."""
    seconds: float = 0.0
    """For the part with faults at most; 0: as long as it takes."""
    seed: int = 1
    """Draws the requests, who leaves and when, and the faults."""
    calm: int = 1000
    """Of the requests so many at the beginning and at the end without faults, whose latencies are compared."""
    pool: int = 240
    """Different requests, beside the later turns of their sessions."""
    clients: int = 16
    """That ask at one time."""
    leaving: float = 0.3
    """Share of the requests whose clients don't wait for the end."""
    fault_s: float = 4.0
    """Between two faults, on average."""
    prefill: int = 2
    """Workers."""
    decode: int = 3
    """Likewise."""
    hung_s: float = 4.0
    """After which the supervisor kills a service that answers nothing."""
    first_patience_s: float = 6.0
    """After which a client that has heard nothing of a stream asks another gateway."""
    patience_s: float = 1.5
    """Likewise of a stream that has begun, which gets a comment in each half second."""
    whole_patience_s: float = 20.0
    """Likewise of an answer that comes in one piece."""
    deadline_s: float = 120.0
    """After which a request without its whole answer is lost."""
    settle_s: float = 30.0
    """What is not given back so long after the last request is leaked."""
    store_bytes: int = 64 << 20
    """Of the store's memory, which shall be full early: what grows later is a leak."""
    batch_lines: int = 2000
    """Lines of a batch that runs in the background, at least 1."""


QUICK = SoakOptions(
    requests=1500,
    calm=100,
    pool=40,
    clients=8,
    fault_s=3.0,
    prefill=1,
    decode=2,
    batch_lines=100,
)
"""A minute or two."""
