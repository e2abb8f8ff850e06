"""`penstock bench failover`: what its figures say of the deaths that it has seen."""

from __future__ import annotations

import pytest

from penstock.bench.failover.deaths import Aftermath, Parts
from penstock.bench.failover.kinds import ALONE
from penstock.bench.failover.measure import figures


def test_figures() -> None:
    found = {
        ("kill", "decode"): [
            Aftermath(0.2, 0, 0, 1),
            Aftermath(0.4, 0, 2, 2, Parts(0.1, 0.02, 0.28)),
            Aftermath(0.3, 1, 0, 4, Parts(0.2, 0.04, 0.06)),
        ],
        ("kill", ALONE): [Aftermath(9.0, 0, 0, 4)],
        ("stop", "decode"): [Aftermath(2.5, 0, 0, 2)],
        ("stop", "router"): [Aftermath(3.5, 0, 1, 4)],
    }
    made = {one.id: one for one in figures(found, [0.6, 0.8])}
    assert {name: (one.value, one.met) for name, one in made.items()} == {
        "streams_lost": (1, False),
        "tokens_wrong": (3, False),
        "gap_s_max_kill": (0.4, True),
        "gap_s_max_stop": (3.5, False),
        "gap_s_kill_decode": (0.3, None),
        "gap_s_kill_only_decode": (9.0, None),
        "gap_s_stop_decode": (2.5, None),
        "gap_s_stop_router": (3.5, None),
        "gap_s_nobody": (pytest.approx(0.7), None),
        "noticed_s_kill_decode": (pytest.approx(0.15), None),
        "planned_s_kill_decode": (pytest.approx(0.03), None),
        "resumed_s_kill_decode": (pytest.approx(0.17), None),
    }
    assert made["streams_lost"].against == "6 deaths, 17 streams"
