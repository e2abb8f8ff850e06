"""`penstock bench trust`: the figures of all parts that are registered here."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.bench.harness import BenchReport
from penstock.bench.parts import Parts, measured
from penstock.bench.trust.attacks import attack_figures
from penstock.bench.trust.faults.measure import fault_figures
from penstock.bench.trust.mutants.measure import mutant_figures
from penstock.bench.trust.sealing import sealing_figures
from penstock.bench.trust.sockets import socket_figures

PARTS: Parts = {
    "sockets": socket_figures,
    "sealing": sealing_figures,
    "attacks": attack_figures,
    "faults": fault_figures,
    "mutants": mutant_figures,
}


async def measure(quick: bool, wanted: Sequence[str] = ()) -> BenchReport:
    """The parts that are wanted; all without names. Raises ConfigError for one that there is not."""
    return BenchReport("trust", await measured(PARTS, quick, wanted))
