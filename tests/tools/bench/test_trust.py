"""The figures of what guards cost."""

from __future__ import annotations

import pytest

from penstock.bench.harness import BenchReport
from penstock.bench.measured.document import section
from penstock.bench.trust.measure import measure
from penstock.bench.trust.sockets import WaySample, way_figures
from penstock.runtime.config import ConfigError


def test_sockets_are_beside_ports_round_by_round() -> None:
    found = {
        one.id: one for one in way_figures([WaySample(0.01, 90.0)] * 2, [WaySample(0.02, 100.0), WaySample(0.01, 90.0)])
    }
    assert (found["unix_vs_tcp_ttft"].min, found["unix_vs_tcp_ttft"].max) == (0.5, 1.0)
    assert found["unix_vs_tcp_ttft"].met is True
    assert (found["unix_vs_tcp_tokens_per_s"].min, found["unix_vs_tcp_tokens_per_s"].met) == (0.9, False)
    text = section(BenchReport("trust", list(found.values())).json())
    assert "TTFT over Unix sockets : over ports" in text


async def test_a_part_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="must be one of sockets, mutants"):
        await measure(True, ["locks"])
